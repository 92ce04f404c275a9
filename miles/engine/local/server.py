"""Options in, a serving process out: loads the model, binds the address, says that it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
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
    prompt tokens that join in one step. ``api_key``: what every request but ``/health`` must bring; an address that others
    can reach needs one.
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 0
    dtype: str = "auto"
    threads: int = 1
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    context_length: int | None = None
    prefill_tokens: int = 1024
    weight_version: str = "default"
    seed: int = 0
    api_key: str | None = None


def open_service(options: EngineOptions) -> Service:
    """Loads the model folder and starts an engine over it, for the running event loop.

    Raises SettingsError or EngineRefused with what is wrong in the options or the folder.
    """
    folder = options.model_path
    config = ModelConfig.read(folder)
    dtype = choose_dtype(options.dtype, config.dtype)
    tokens, context = _sizes(options, config, dtype)
    text = Text(folder)
    cache = KVCache(config, dtype, tokens, options.max_running_requests)
    model = Model(config, load_folder(folder, config, dtype))
    engine = Engine(model, Scheduler(cache, options.prefill_tokens), text.decode, options.weight_version)
    description = {
        "model_path": str(folder),
        "architecture": config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "context_length": context,
        "max_running_requests": options.max_running_requests,
        "max_total_num_tokens": tokens,
        "threads": torch.get_num_threads(),
    }
    dialect = Dialect(text, config.vocab_size, context, config.eos_ids)
    return Service(engine, dialect, config, dtype, description, options.seed)


def _sizes(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Tokens of the KV cache, and most tokens of prompt plus response."""
    context = options.context_length or config.context_length
    if context > config.context_length:
        raise SettingsError([f"--context-length {context} is more than the model's {config.context_length} positions"])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = max(memory // 8 // (config.kv_values_per_token * dtype.itemsize), 1)
    tokens = options.max_total_tokens or min(options.max_running_requests * context, affordable)
    if options.context_length and context > tokens:
        raise SettingsError([f"--context-length {context} does not fit into a KV cache of {tokens} tokens"])
    return tokens, min(context, tokens)


def serve(options: EngineOptions, parent_fd: int | None = None) -> None:
    """Serves until SIGTERM, SIGINT, or the end of the process behind ``parent_fd`` (a pidfd).

    Raises what `open_service` raises, and SettingsError where the address can't be bound.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    torch.set_num_threads(options.threads)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stopped = runner.run(_serve(options, parent_fd))
    if not stopped:
        os._exit(0)  # a step can't be interrupted, and Python must not end under a thread that computes


async def _serve(options: EngineOptions, parent_fd: int | None) -> bool:
    """Whether the engine's thread ended in time."""
    if options.api_key is None and not _is_loopback(options.host):
        raise SettingsError(
            [f"--host {options.host} can be reached by others and needs an --api-key; 127.0.0.1 works without"]
        )
    listener = _bind(options.host, options.port)
    service = open_service(options)
    config = uvicorn.Config(
        Application(service, options.api_key),
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
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # uvicorn takes them while it serves, and raises them again after that
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
