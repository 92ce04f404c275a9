"""Settings in, every problem of the schedule out: settings under which no group could start or no batch ever fill."""

from __future__ import annotations

from typing import Any

from miles.config import Problems, Settings
from miles.config.settings import FIRST_ERA_PATHS, FULLY_ASYNC_PATHS
from miles.errors import HookError
from miles.hooks import load_function
from miles.rollout.saved_rollouts import NUMBER, path_of


def check(settings: Settings, problems: Problems) -> None:
    """The rollout room's own settings."""
    if settings.rollout.rollout_batch_size is None:
        problems.add("--rollout-batch-size", None, "prompts per training step are needed", "for example 32 works")
    _check_schedule(settings, problems)
    _check_sampling(settings, problems)
    _check_mode(settings, problems)
    _check_hooks(settings, problems)
    _check_saved_rollouts(settings, problems)


def _check_schedule(settings: Settings, problems: Problems) -> None:
    rollout, n = settings.rollout, settings.rollout.n_samples_per_prompt
    batch = rollout.rollout_batch_size
    if rollout.async_max_concurrent_samples is not None and rollout.async_max_concurrent_samples < n:
        problems.add(
            "--async-max-concurrent-samples", rollout.async_max_concurrent_samples,
            f"one group needs --n-samples-per-prompt {n} slots at once, so none could ever start", f"{n} or more works",
        )  # fmt: skip
    if batch is not None and settings.buffer_groups < 1:
        problems.add(
            "--async-data-buffer-capacity-factor", rollout.async_data_buffer_capacity_factor,
            f"{rollout.async_data_buffer_capacity_factor:g} x {batch} groups rounds down to a buffer of 0",
            f"{1 / batch:.3g} works",
        )  # fmt: skip
    elif batch is not None and max(settings.buffer_groups, settings.slots // n) < batch:
        problems.add(
            "--async-data-buffer-capacity-factor", rollout.async_data_buffer_capacity_factor,
            f"{settings.buffer_groups} groups waiting and {settings.slots // n} running: a batch of {batch} may never fill",
            "1 works",
        )  # fmt: skip
    for flag, value in (
        ("--max-weight-staleness", rollout.max_weight_staleness),
        ("--rollout-retry-budget", rollout.rollout_retry_budget),
    ):
        if value is not None and value < 0:
            problems.add(flag, value, "must not be negative", "0 or more works")
    for flag in ("--max-weight-staleness", "--staleness-policy"):
        if flag.lstrip("-").replace("-", "_") in settings.given and not settings.fully_async:
            problems.warn(f"{flag} bounds fully-async training only; this run is {settings.mode}")
    if settings.fully_async and rollout.staleness_policy != "evict" and rollout.max_weight_staleness is None:
        problems.warn(
            f"--staleness-policy {rollout.staleness_policy} has nothing to keep without --max-weight-staleness"
        )
    relative = settings.train.advantage_estimator != "reinforce_plus_plus" and settings.train.loss_type == "policy_loss"
    if n == 1 and relative and settings.train.rewards_normalization:
        problems.warn("--n-samples-per-prompt 1: a sample alone in its group has advantage 0, so nothing is learned")
    if settings.sampling.rollout_max_response_len is None and settings.sampling.rollout_max_context_len is None:
        problems.add("--rollout-max-response-len", None, "nothing bounds a response", "for example 1024 works")


def _check_sampling(settings: Settings, problems: Problems) -> None:
    sampling, evaluation, sets = settings.sampling, settings.eval, settings.eval_datasets
    top_p = {f"--eval-config {d.name} top_p": d.top_p for d in sets}
    for flag, value in {
        "--rollout-top-p": sampling.rollout_top_p,
        "--eval-top-p": evaluation.eval_top_p,
        **top_p,
    }.items():
        if value is not None and not 0 < value <= 1:
            problems.add(flag, value, "is no share of probability", "above 0 and up to 1 works")
    top_k = {f"--eval-config {d.name} top_k": d.top_k for d in sets}
    for flag, count in {
        "--rollout-top-k": sampling.rollout_top_k,
        "--eval-top-k": evaluation.eval_top_k,
        **top_k,
    }.items():
        if count is not None and count != -1 and count < 1:
            problems.add(flag, count, "keeps no token", "1 or more works, or -1 for all")
    temperatures = {f"--eval-config {d.name} temperature": d.temperature for d in sets}
    for flag, value in {"--eval-temperature": evaluation.eval_temperature, **temperatures}.items():
        if value is not None and value < 0:
            problems.add(flag, value, "must not be negative", "0 (greedy) or more works")
    _check_eval_lengths(settings, problems)


def _check_eval_lengths(settings: Settings, problems: Problems) -> None:
    context, own = settings.sampling.rollout_max_context_len, settings.eval.eval_max_context_len
    if context is not None and own is not None and own > context:
        problems.add(
            "--eval-max-context-len", own, f"engines are started for --rollout-max-context-len {context}",
            f"{context} or less works",
        )  # fmt: skip
    evaluation = {"--eval-min-new-tokens": settings.eval_sampling_params()}
    sets = {f"--eval-config {d.name} min_new_tokens": d for d in settings.eval_datasets if d.min_new_tokens is not None}
    evaluation |= {flag: settings.eval_sampling_params() | d.sampling_params() for flag, d in sets.items()}
    for flag, params in evaluation.items():
        least, most = params.get("min_new_tokens"), params["max_new_tokens"]
        if least is not None and not 0 <= least <= (most or least):
            most = f"0 to {most}" if most else "0 or more"
            problems.add(flag, least, "is no number of tokens that a response may have", f"{most} works")


def _check_mode(settings: Settings, problems: Problems) -> None:
    rollout = settings.rollout
    path = rollout.rollout_function_path
    if rollout.fully_async and path is not None:
        problems.add(
            "--rollout-function-path",
            path,
            "--fully-async picks the rollout function itself",
            "leave one of the two out",
        )
    if settings.fully_async and settings.program == "train":
        problems.add("--fully-async", "", "train.py trains synchronously", "run train_async.py")
    if settings.eval.eval_function_path in FULLY_ASYNC_PATHS:
        problems.add(
            "--eval-function-path", settings.eval.eval_function_path, "makes training batches only",
            "without this, --eval-prompt-data is evaluated",
        )  # fmt: skip
    if path == FIRST_ERA_PATHS[-1]:
        problems.warn(f"--rollout-function-path {path} has moved to {FIRST_ERA_PATHS[0]}; it works as before")
    if settings.fully_async and settings.engine.pause_generation_mode == "abort":
        problems.add(
            "--pause-generation-mode", "abort", "each weight update would abort every running sample of a fully-async run",
            "retract or in_place works",
        )  # fmt: skip
    own_sets = settings.eval.eval_interval is not None and settings.eval.eval_function_path is None
    if settings.reward.group_rm and own_sets:
        problems.add(
            "--group-rm", "", "evaluation samples are scored one by one, and this reward expects whole groups",
            "leave --eval-interval out, or score samples alone",
        )  # fmt: skip
    if rollout.rollout_partial_groups and settings.reward.group_rm:
        problems.add("--rollout-partial-groups", "", "--group-rm scores whole groups", "leave one of the two out")


def _check_hooks(settings: Settings, problems: Problems) -> None:
    rollout = settings.rollout
    paths = {
        "--custom-generate-function-path": rollout.custom_generate_function_path,
        "--dynamic-sampling-filter-path": rollout.dynamic_sampling_filter_path,
        "--rollout-sample-filter-path": rollout.rollout_sample_filter_path,
        "--custom-async-data-buffer-path": rollout.custom_async_data_buffer_path,
        "--custom-convert-samples-to-train-data-path": settings.reward.custom_convert_samples_to_train_data_path,
    }
    paths |= {
        "--custom-rollout-log-function-path": rollout.custom_rollout_log_function_path,
        "--custom-eval-rollout-log-function-path": settings.eval.custom_eval_rollout_log_function_path,
        "--eval-function-path": settings.eval.eval_function_path,
    }
    if settings.mode == "function":
        paths["--rollout-function-path"] = rollout.rollout_function_path
    for dataset in settings.eval_datasets:
        paths[f"--eval-config {dataset.name} custom_generate_function_path"] = dataset.custom_generate_function_path
    for flag, path in paths.items():
        try:
            function = load_function(path)
        except HookError as error:
            problems.add(flag, path, str(error), "give a path that can be imported here")
            continue
        if flag == "--custom-async-data-buffer-path" and path:
            _check_data_buffer(settings, function, problems)
        if hasattr(function, "check"):
            function.check(settings, problems)


def _check_data_buffer(settings: Settings, made: Any, problems: Problems) -> None:
    flag, path = "--custom-async-data-buffer-path", settings.rollout.custom_async_data_buffer_path
    lacking = [name for name in ("put", "get", "get_metrics") if not hasattr(made, name)]
    if lacking:
        problems.add(
            flag, path, f"has no {' and no '.join(lacking)}",
            "a subclass of miles.rollout.fully_async_data_buffer.DataBuffer works",
        )  # fmt: skip
    if settings.rollout.staleness_policy == "wait":
        problems.add(
            "--staleness-policy", "wait", f"{path} alone knows which groups it gives next", "evict and mask work"
        )
    if not settings.fully_async:
        why = f"only finished groups of a fully-async run wait in a buffer; this run is {settings.mode}"
        problems.add(flag, path, why, "with --fully-async it works")


def _check_saved_rollouts(settings: Settings, problems: Problems) -> None:
    """Each step has a file of its own, and what is to be read is there."""
    debug = settings.debug
    flags = {
        "--save-debug-rollout-data": debug.save_debug_rollout_data,
        "--load-debug-rollout-data": debug.load_debug_rollout_data,
    }
    for flag, template in flags.items():
        if template is not None and NUMBER not in template:
            problems.add(flag, template, "every step would have the same file", f"rollouts/{NUMBER}.pt works")
    load, first = debug.load_debug_rollout_data, debug.start_rollout_id or 0
    if load is None:
        return
    if debug.debug_rollout_only:
        problems.add(
            "--debug-rollout-only", "", "--load-debug-rollout-data generates nothing", "leave one of the two out"
        )
    if settings.eval.eval_interval is not None:
        problems.add("--eval-interval", settings.eval.eval_interval, "no engine starts", "leave it out")
    if settings.checkpoint.load is None and NUMBER in load and not path_of(load, first).is_file():
        problems.add(
            "--load-debug-rollout-data", load, f"there is no {path_of(load, first)}", "files of an earlier run work"
        )
