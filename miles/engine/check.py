"""Settings in, every problem with the engines out."""

from __future__ import annotations

from miles.config import Problems, Settings
from miles.engine.launch import model_context

LOCAL = ("auto", "local")


def check(settings: Settings, problems: Problems) -> None:
    """The engine room's own settings."""
    engine = settings.engine
    if engine.rollout_backend in ("sglang", "vllm"):
        problems.add("--rollout-backend", engine.rollout_backend, "is not here yet", "local works")
    gpus, per_engine = engine.rollout_num_gpus, engine.rollout_num_gpus_per_engine
    if gpus is not None and gpus % per_engine:
        problems.add(
            "--rollout-num-gpus", gpus,
            f"is not a multiple of --rollout-num-gpus-per-engine {per_engine}",
            f"{max(1, gpus // per_engine) * per_engine} works",
        )  # fmt: skip
    if settings.train.actor_num_nodes > 1 and engine.update_weight_transfer_mode != "disk":
        problems.add(
            "--actor-num-nodes", settings.train.actor_num_nodes, "weights go through the shared memory of one machine",
            "1 works, or --update-weight-transfer-mode disk with --update-weight-disk-dir on a shared filesystem",
        )  # fmt: skip
    _check_context(settings, problems)


def _check_context(settings: Settings, problems: Problems) -> None:
    engine, sampling = settings.engine, settings.sampling
    longest = model_context(settings.model.hf_checkpoint)
    for flag, value in (
        ("--rollout-max-context-len", sampling.rollout_max_context_len),
        ("--rollout-max-response-len", sampling.rollout_max_response_len),
        ("--eval-max-response-len", settings.eval.eval_max_response_len),
    ):
        if longest is not None and value is not None and value > longest:
            problems.add(flag, value, f"the model's max_position_embeddings is {longest}", f"{longest} or less works")
    context = sampling.rollout_max_context_len
    total = engine.sglang_max_total_tokens
    if context is not None and total is not None and total < context:
        problems.add(
            "--sglang-max-total-tokens", total,
            f"one request may need --rollout-max-context-len {context} tokens of KV cache", f"{context} or more works",
        )  # fmt: skip
    if settings.passthrough and engine.rollout_backend in LOCAL:
        problems.warn(f"no effect on the local engine and its router: {', '.join(settings.passthrough)}")
    if engine.update_weight_disk_dir is not None and engine.update_weight_transfer_mode != "disk":
        problems.warn("--update-weight-disk-dir has no effect without --update-weight-transfer-mode disk")
