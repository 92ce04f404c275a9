"""Settings in, problems out: what the trainer can't do with them, found before anything starts and without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from miles.config import Problems, Settings
from miles.train.check_losses import check_losses

STEP_FIELDS = {
    "--global-batch-size": "global_batch_size",
    "--num-steps-per-rollout": "num_steps_per_rollout",
    "--actor-num-gpus-per-node": "actor_num_gpus_per_node",
}
RIVALS = {"--global-batch-size": "--num-steps-per-rollout", "--num-steps-per-rollout": "--global-batch-size"}


def check(settings: Settings, problems: Problems) -> None:
    """The trainer's own settings: model folder, batch arithmetic, micro-batches, optimizer, loss."""
    _check_checkpoint(settings, problems)
    if settings.rollout.rollout_batch_size is not None:
        _check_steps(settings, problems)
    _check_micro_batches(settings, problems)
    _check_optimizer(settings, problems)
    check_losses(settings, problems)


def _check_checkpoint(settings: Settings, problems: Problems) -> None:
    folder = settings.model.hf_checkpoint
    works = "a local folder in Hugging Face format works: config.json, tokenizer, safetensors"
    if folder is None:
        problems.add("--hf-checkpoint", None, "there is no model to train", works)
    elif not Path(folder).is_dir():
        problems.add("--hf-checkpoint", folder, "there is no such folder", works)
    elif not (Path(folder) / "config.json").is_file():
        problems.add("--hf-checkpoint", folder, "the folder has no config.json", works)


def _check_steps(settings: Settings, problems: Problems) -> None:
    uneven = _uneven(settings)
    if uneven is not None:
        flag, why = uneven
        problems.add(flag, getattr(settings.train, STEP_FIELDS[flag]), why, _what_works(settings, flag))


def _uneven(settings: Settings) -> tuple[str, str] | None:
    """Where samples per batch, per optimizer step and per rank don't come out even: the flag to change, and why."""
    train, n, total = settings.train, settings.rollout.n_samples_per_prompt, settings.batch_samples
    size, steps, ranks = train.global_batch_size, train.num_steps_per_rollout, settings.trainer_ranks
    made = f"--rollout-batch-size {settings.rollout.rollout_batch_size} x --n-samples-per-prompt {n} = {total} samples"
    per_step = f"{settings.samples_per_optimizer_step} samples per optimizer step"
    if size is not None and steps is not None and size * steps != total:
        return "--num-steps-per-rollout", f"x --global-batch-size {size} = {size * steps} samples, but {made}"
    if size is not None and total % size:
        return (
            "--global-batch-size",
            f"{made}; // {size} = {total // size} optimizer steps, {total % size} samples left over",
        )
    if steps is not None and total % steps:
        return "--num-steps-per-rollout", f"{made}, which {steps} optimizer steps can't share evenly"
    if settings.samples_per_optimizer_step % n:
        flag = "--num-steps-per-rollout" if size is None else "--global-batch-size"
        return flag, f"{per_step} would split groups of --n-samples-per-prompt {n}"
    if settings.samples_per_optimizer_step % ranks:
        return "--actor-num-gpus-per-node", f"{ranks} trainer ranks can't share {per_step} evenly"
    return None


def _what_works(settings: Settings, flag: str) -> str:
    """The value nearest to the one given under which everything comes out even."""
    rival = RIVALS.get(flag)
    change: dict[str, Any] = {} if rival is None else {STEP_FIELDS[rival]: None}
    given = getattr(settings.train, STEP_FIELDS[flag]) or 1
    for value in sorted(range(1, settings.batch_samples + 1), key=lambda value: abs(value - given)):
        change[STEP_FIELDS[flag]] = value
        if _uneven(replace(settings, train=replace(settings.train, **change))) is None:
            without = rival is not None and getattr(settings.train, STEP_FIELDS[rival]) is not None
            return f"{flag} {value}{f' without {rival}' if without else ''} works"
    ranks, batch = settings.trainer_ranks, settings.rollout.rollout_batch_size or 1
    return f"--rollout-batch-size {-(-batch // ranks) * ranks} in one optimizer step works"


def _check_micro_batches(settings: Settings, problems: Problems) -> None:
    train, sampling = settings.train, settings.sampling
    limit = train.max_tokens_per_gpu
    if limit is None:
        if train.use_dynamic_batch_size:
            longest = sampling.rollout_max_context_len or sampling.rollout_max_response_len or 4096
            problems.add(
                "--use-dynamic-batch-size", "", "needs a token limit for micro-batches",
                f"--max-tokens-per-gpu {2 * longest} works",
            )  # fmt: skip
        return
    context, response = sampling.rollout_max_context_len, sampling.rollout_max_response_len
    longest = context or (response or 0) + 1
    if limit < longest:
        of = (
            f"--rollout-max-context-len {context}" if context else f"a prompt and --rollout-max-response-len {response}"
        )
        problems.add(
            "--max-tokens-per-gpu", limit,
            f"one sample may have {longest} tokens ({of}), more than a micro-batch", f"{longest} or more works",
        )  # fmt: skip


def _check_optimizer(settings: Settings, problems: Problems) -> None:
    train = settings.train
    for flag, beta in (("--adam-beta1", train.adam_beta1), ("--adam-beta2", train.adam_beta2)):
        if not 0 <= beta < 1:
            problems.add(flag, beta, "must be at least 0 and below 1", "0.9 works")
    if not 0 <= train.min_lr <= train.lr:
        problems.add("--min-lr", train.min_lr, f"must be between 0 and --lr {train.lr}", "0 works")
    for flag, value in (
        ("--weight-decay", train.weight_decay),
        ("--clip-grad", train.clip_grad),
        ("--lr-warmup-iters", train.lr_warmup_iters),
    ):
        if value < 0:
            problems.add(flag, value, "must not be negative", "0 works")
