"""Settings and a port in, the way to start the embedded engine out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.config import Settings
from miles.engine.launch import Launch

ROOT = Path(__file__).parents[3]
READY_LINE = "miles-engine ready"


def launch(settings: Settings, *, model: str, port: int, extra: Sequence[str] = ()) -> Launch:
    """Serves ``model`` on 127.0.0.1:``port``; ``extra`` are more arguments, which win over those before them."""
    sampling, engine = settings.sampling, settings.engine
    argv = [
        sys.executable, "-m", "miles.engine.local",
        "--model-path", model,
        "--port", str(port),
        "--dtype", settings.model.dtype,
        "--threads", str(settings.model.torch_threads),
        "--max-running-requests", str(engine.sglang_max_running_requests),
    ]  # fmt: skip
    if engine.sglang_max_total_tokens is not None:
        argv += ["--max-total-tokens", str(engine.sglang_max_total_tokens)]
    if sampling.rollout_max_context_len is not None:
        argv += ["--context-length", str(sampling.rollout_max_context_len)]
    if engine.deterministic_mode:
        argv.append("--deterministic")
    # the engine is of the same checkout as this process, installed or not, wherever the run was started
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return Launch((*argv, *extra), env, READY_LINE)
