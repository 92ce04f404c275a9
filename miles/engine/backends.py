"""``--rollout-backend`` in, everything that differs between the inference servers out.

Above this module nobody asks which server it is: processes are started by a `Launch`, and requests, in SGLang's protocol, go
through a `Transport` that adapts them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from miles.config import Settings
from miles.config.owners import EngineSettings
from miles.engine import sglang, vllm
from miles.engine.launch import Launch, interpreter
from miles.engine.local import launch as local
from miles.engine.wire import Transport

LOOKS_FOR = (
    "import importlib.util as u, sys; sys.path = [p for p in sys.path if p]; sys.exit(not u.find_spec(sys.argv[1]))"
)
LOOK_TIMEOUT_S = 60.0


class Launcher(Protocol):
    """The way to start a server; ``extra`` are more arguments for it, which win."""

    def __call__(self, settings: Settings, *, model: str, port: int, extra: Sequence[str] = ()) -> Launch: ...


@dataclass(frozen=True)
class Backend:
    """An inference server.

    ``weights``: the kinds of `miles.types.Weights` that it loads, best first. ``start_timeout_s``: seconds it may take
    to start, where the user says nothing. ``module``: what the interpreter of the engines must have. ``flags``: how the flags
    start that are the server's own.
    """

    name: str
    launch: Launcher
    adapt: Callable[[Transport], Transport]
    weights: tuple[str, ...]
    start_timeout_s: float
    module: str | None = None
    flags: str | None = None

    @property
    def uses_gpus(self) -> bool:
        """The embedded engine computes on the CPU, whatever is there."""
        return self.module is not None

    def passed_on(self, passthrough: Mapping[str, Any]) -> list[str]:
        """The server's own flags, as its command line has them: ``--sglang-X 1`` becomes ``--X 1``."""
        words: list[str] = []
        for name, value in passthrough.items():
            if self.flags is not None and name.startswith(self.flags):
                words.append("--" + name.removeprefix(self.flags))
                words += [] if value is True else [value] if isinstance(value, str) else value
        return words


def _as_it_is(transport: Transport) -> Transport:
    return transport


BACKENDS = {
    b.name: b
    for b in (
        Backend("local", local.launch, _as_it_is, ("shm", "disk", "broadcast"), 120.0),
        Backend("sglang", sglang.launch, sglang.SglangTransport, ("disk", "broadcast"), 1800.0, "sglang", "--sglang-"),
        Backend("vllm", vllm.launch, vllm.VllmTransport, ("disk",), 1800.0, "vllm"),
    )
}


def backend_of(engine: EngineSettings) -> Backend:
    """The backend that the settings mean; auto is sglang where an accelerator and sglang are there, else local."""
    if engine.rollout_backend != "auto":
        return BACKENDS[engine.rollout_backend]
    sglang_runs = has_accelerator() and why_not_importable(interpreter(engine), "sglang") is None
    return BACKENDS["sglang" if sglang_runs else "local"]


NETWORK_TRANSFERS = ("broadcast", "p2p")
"""Ways that launch scripts ask for and that change no result: where a backend lacks one, its own best takes its place."""


def weights_kind(engine: EngineSettings, backend: Backend) -> str:
    """How weights travel: as ``--update-weight-transfer-mode`` says, auto being what suits the backend best."""
    mode = engine.update_weight_transfer_mode
    return backend.weights[0] if mode == "auto" or is_replaced(mode, backend) else mode


def is_replaced(mode: str, backend: Backend) -> bool:
    """Whether the backend sends weights in its own best way, though another one was asked for."""
    return mode in NETWORK_TRANSFERS and mode not in backend.weights


def has_accelerator() -> bool:
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")


@cache
def why_not_importable(python: str, module: str) -> str | None:
    """Why the interpreter ``python`` can't have ``module``; None: it has it. The module itself is not imported."""
    env = Launch((python,)).environ(os.environ)
    try:
        looked = subprocess.run(
            [python, "-c", LOOKS_FOR, module], env=env, capture_output=True, text=True, timeout=LOOK_TIMEOUT_S
        )
    except OSError as error:
        return f"{python} can't be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"{python} didn't answer within {LOOK_TIMEOUT_S:g} s"
    if looked.returncode == 0:
        return None
    said = looked.stderr.strip().splitlines()
    return f"{python} has no module {module}" + (f" ({said[-1]})" if said else "")
