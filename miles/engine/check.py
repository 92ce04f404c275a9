"""Settings in, every problem with the engines out."""

from __future__ import annotations

import os

from miles.config import Problems, Settings
from miles.engine.backends import (
    BACKENDS,
    Backend,
    backend_of,
    has_accelerator,
    is_replaced,
    weights_kind,
    why_not_importable,
)
from miles.engine.launch import interpreter, model_context


def check(settings: Settings, problems: Problems) -> None:
    """The engine room's own settings."""
    engine = settings.engine
    backend = backend_of(engine)
    if backend.module is not None:
        _check_server(settings, backend, backend.module, problems)
    idle = [n for n in settings.passthrough if backend.flags is None or not n.startswith(backend.flags)]
    if idle:
        problems.warn(f"no effect on the {backend.name} engine and its router: {', '.join(idle)}")
    if backend.module is None and engine.engine_python is not None:
        problems.warn(
            f"--engine-python {engine.engine_python} has no effect: the local engine runs in this interpreter"
        )
    mode = engine.update_weight_transfer_mode
    if is_replaced(mode, backend):
        problems.warn(
            f"--update-weight-transfer-mode {mode} is not here yet: weights reach the {backend.name} engines through "
            f"{backend.weights[0]}, which changes no result"
        )
    elif mode not in ("auto", *backend.weights):
        works = ", ".join(("auto", *backend.weights[:-1])) + " and " + backend.weights[-1]
        problems.add(
            "--update-weight-transfer-mode", mode, f"the {backend.name} backend can't take it", f"{works} work"
        )
    gpus, per_engine = engine.rollout_num_gpus, engine.rollout_num_gpus_per_engine
    if gpus is not None and gpus % per_engine:
        problems.add(
            "--rollout-num-gpus", gpus,
            f"is not a multiple of --rollout-num-gpus-per-engine {per_engine}",
            f"{max(1, gpus // per_engine) * per_engine} works",
        )  # fmt: skip
    if settings.train.actor_num_nodes > 1 and weights_kind(engine, backend) == "shm":
        problems.add(
            "--actor-num-nodes", settings.train.actor_num_nodes, "weights go through the shared memory of one machine",
            "1 works, or --update-weight-transfer-mode broadcast, or disk with --update-weight-disk-dir on a shared "
            "filesystem",
        )  # fmt: skip
    _check_context(settings, problems)
    _check_router(settings, problems)


def _check_router(settings: Settings, problems: Problems) -> None:
    port = settings.engine.sglang_router_port
    if not 0 <= port <= 65535:
        problems.add("--sglang-router-port", port, "is no port", "0 (a free one) to 65535 works")


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
    if engine.update_weight_disk_dir is not None and weights_kind(engine, backend_of(engine)) != "disk":
        problems.warn("--update-weight-disk-dir has no effect without --update-weight-transfer-mode disk")


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
