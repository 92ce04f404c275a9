"""Settings in, every problem with the engines out."""

from __future__ import annotations

from miles.config import Problems, Settings

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
    context = settings.sampling.rollout_max_context_len
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
