"""Options in, a serving process out: loads the model, binds the address, says that it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import uvicorn
import uvloop

from miles.engine.local.application import Application
from miles.engine.local.dialect import Dialect
from miles.engine.local.engine import Engine
from miles.engine.local.kv_cache import KVCache
from miles.engine.local.model import Model
from miles.engine.local.model_config import ModelConfig, choose_dtype
from miles.engine.local.scheduler import Scheduler
from miles.engine.local.service import Service
from miles.engine.local.step_thread import StepThread
from miles.engine.local.text import Text
from miles.engine.local.weights import load_folder
from miles.errors import SettingsError

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed under a request that is on its way."""
STOP_TIMEOUT_S = 5


@dataclass(frozen=True)
class EngineOptions:
    """What `python -m miles.engine.local` takes.

    ``context_length`` None: the model's. ``max_total_tokens``, the size of the KV cache, None: what all running requests
    need at full context, but no more than an eighth of the machine's memory. ``prefill_tokens``: most
    prompt tokens that join in one step.
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 0
    dtype: str = "auto"
    threads: int = 1
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    context_length: int | None = None
    prefill_tokens: int = 2048
    weight_version: str = "default"
    seed: int = 0


@dataclass(frozen=True)
class Loaded:
    """A model folder, ready for an engine."""

    options: EngineOptions
    config: ModelConfig
    dtype: torch.dtype
    model: Model
    text: Text
    max_total_tokens: int
    context_length: int

    @classmethod
    def load(cls, options: EngineOptions) -> Loaded:
        """Reads everything. Raises SettingsError or EngineRefused with what is wrong in the folder or the options."""
        config = ModelConfig.read(options.model_path)
        dtype = choose_dtype(options.dtype, config.dtype)
        context = options.context_length or config.context_length
        total = options.max_total_tokens or _default_total_tokens(options, config, dtype, context)
        problems = []
        if context > config.context_length:
            problems.append(f"--context-length {context} is more than the model's {config.context_length} positions")
        if options.context_length and options.max_total_tokens and context > total:
            problems.append(f"--context-length {context} does not fit into --max-total-tokens {total}")
        if problems:
            raise SettingsError(problems)
        model = Model(config, load_folder(options.model_path, config, dtype))
        return cls(options, config, dtype, model, Text(options.model_path), total, min(context, total))

    def service(self) -> Service:
        """A started engine behind a service on the running event loop."""
        cache = KVCache(self.config, self.dtype, self.max_total_tokens, self.options.max_running_requests)
        scheduler = Scheduler(cache, self.options.prefill_tokens)
        engine = Engine(self.model, scheduler, self.text.decode, self.options.weight_version)
        dialect = Dialect(self.text, self.config.vocab_size, self.context_length, self.config.eos_ids)
        description = {
            "model_path": str(self.options.model_path),
            "architecture": self.config.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "vocab_size": self.config.vocab_size,
            "context_length": self.context_length,
            "max_running_requests": self.options.max_running_requests,
            "max_total_num_tokens": self.max_total_tokens,
            "threads": torch.get_num_threads(),
        }
        return Service(engine, dialect, self.config, self.dtype, description, self.options.seed)


def serve(options: EngineOptions, parent_fd: int | None = None) -> None:
    """Serves until SIGTERM, SIGINT, or the end of the process behind ``parent_fd`` (a pidfd).

    Raises what `Loaded.load` raises, and OSError where the address is taken.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    torch.set_num_threads(options.threads)
    loaded = Loaded.load(options)
    listener = _bind(options.host, options.port)
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # uvicorn takes them while it serves, and raises them again after that
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stopped = runner.run(_serve(loaded, listener, parent_fd))
    if not stopped:
        os._exit(0)  # a step can't be interrupted, and Python must not end under a thread that computes


async def _serve(loaded: Loaded, listener: socket.socket, parent_fd: int | None) -> bool:
    service = loaded.service()
    config = uvicorn.Config(
        Application(service),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
    )
    server = _Server(config, service.thread)
    if parent_fd is not None:
        asyncio.get_running_loop().add_reader(parent_fd, server.end)
    await server.serve(sockets=[listener])
    return await asyncio.to_thread(service.thread.wait_stopped, STOP_TIMEOUT_S)


class _Server(uvicorn.Server):
    """Says when it is ready, and aborts what runs when it is told to end."""

    def __init__(self, config: uvicorn.Config, thread: StepThread) -> None:
        super().__init__(config)
        self._thread = thread

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        sys.stdout.write(f"miles-engine ready http://{f'[{host}]' if ':' in host else host}:{port}\n")
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.end()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        self.should_exit = True
        self._thread.stop()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise SettingsError(
            [f"--host {host} --port {port} can't be bound: {error}; --port 0 takes a free port"]
        ) from error
    return listener


def _default_total_tokens(options: EngineOptions, config: ModelConfig, dtype: torch.dtype, context: int) -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = memory // 8 // (config.kv_values_per_token * dtype.itemsize)
    return max(min(options.max_running_requests * context, affordable), 1)
