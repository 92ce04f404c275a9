"""Settings in, every problem with the engines out."""

from __future__ import annotations

import os

from miles.config import Problems, Settings
from miles.engine.backends import BACKENDS, Backend, backend_of, has_accelerator, why_not_importable
from miles.engine.launch import interpreter


def check(settings: Settings, problems: Problems) -> None:
    """The engine room's own settings."""
    engine = settings.engine
    backend = backend_of(engine)
    if backend.module is not None:
        _check_server(settings, backend, backend.module, problems)
    elif engine.engine_python is not None:
        problems.warn(
            f"--engine-python {engine.engine_python} has no effect: the local engine runs in this interpreter"
        )
    mode = engine.update_weight_transfer_mode
    if mode not in ("auto", *backend.weights):
        works = " and ".join(backend.weights)
        problems.add(
            "--update-weight-transfer-mode", mode, f"the {backend.name} backend can't take it", f"auto and {works} work"
        )
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


def _check_server(settings: Settings, backend: Backend, module: str, problems: Problems) -> None:
    """What a server of another project needs: its package in its interpreter, and a device, here or in the cluster."""
    engine = settings.engine
    reason = why_not_importable(interpreter(engine), module)
    if reason is not None:
        problems.add(
            "--engine-python", engine.engine_python or "",
            f"--rollout-backend {backend.name} needs an interpreter that has it, and {reason}",
            f"--engine-python with the python of an environment that holds {module} works, and so does local",
        )  # fmt: skip
    if not has_accelerator() and not os.environ.get("RAY_ADDRESS"):
        problems.add(
            "--rollout-backend", backend.name,
            f"needs {engine.rollout_num_gpus_per_engine} GPU per engine, and this machine has none",
            "a cluster (RAY_ADDRESS) or local works",
        )  # fmt: skip
    if backend is BACKENDS["vllm"] and engine.sglang_max_total_tokens is not None:
        problems.add(
            "--sglang-max-total-tokens", engine.sglang_max_total_tokens,
            "vllm sizes its KV cache by memory", "leaving it out works",
        )  # fmt: skip
