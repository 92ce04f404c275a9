"""Settings and a port in, the command line of an inference server out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles.config import Settings


def engine_command(settings: Settings, *, model: str, port: int) -> list[str]:
    """The command that serves ``model`` on 127.0.0.1:``port`` with the embedded engine."""
    sampling, engine = settings.sampling, settings.engine
    command = [
        sys.executable, "-m", "miles.engine.local",
        "--model-path", model,
        "--port", str(port),
        "--dtype", settings.model.dtype,
        "--threads", str(settings.model.torch_threads),
        "--max-running-requests", str(engine.sglang_max_running_requests),
    ]  # fmt: skip
    if engine.sglang_max_total_tokens is not None:
        command += ["--max-total-tokens", str(engine.sglang_max_total_tokens)]
    if sampling.rollout_max_context_len is not None:
        command += ["--context-length", str(sampling.rollout_max_context_len)]
    return command


def model_context(model: str | None) -> int | None:
    """The longest sequence that the model's config allows; None where it doesn't say."""
    config = Path(model or "", "config.json")
    if not model or not config.is_file():
        return None
    length = json.loads(config.read_text()).get("max_position_embeddings")
    return int(length) if length else None
