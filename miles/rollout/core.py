"""What a process generates with (engines, tokenizer, rewards, version): the run's, or one's own from ``args``.

A run adopts its core on its event loop. Hooks find it there from that loop, and from a thread or a loop of their own where
the run's loop is the process's (`miles.loops`). Outside any run a core is built for the router that ``args`` name.
"""

from __future__ import annotations

import asyncio
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from miles import loops
from miles.config import Settings
from miles.data.render import PromptEncoder, load_tokenizer
from miles.engine.client import EngineClient
from miles.engine.http import HttpTransport
from miles.engine.router import RoutingTable
from miles.engine.wire import Transport
from miles.rollout.rm_hub.pool import ProcessScorer
from miles.rollout.rm_hub.rewards import Rewards
from miles.rollout.scoring import Scoring
from miles.rollout.staleness import Versions
from miles.types import Message

Encode = Callable[[str | list[Message], Any], list[int]]


@dataclass(frozen=True)
class Core:
    """``loop`` is the one that all of it lives on. ``versions`` None: nobody here knows, the engines' labels count.

    ``requests`` numbers them, so that no two have one id.
    """

    client: EngineClient
    versions: Versions | None
    encode: Encode
    tokenizer: Any
    scoring: Scoring
    loop: asyncio.AbstractEventLoop | None = None
    requests: Iterator[int] = field(default_factory=itertools.count)


_cores: WeakKeyDictionary[asyncio.AbstractEventLoop, Core] = WeakKeyDictionary()


def make_client(settings: Settings, transport: Transport) -> EngineClient:
    """A client with an empty routing table."""
    return EngineClient(RoutingTable(engine_wait_s=settings.engine.engine_wait_s), transport)


def adopt(core: Core) -> None:
    """Makes ``core`` the one that hooks find."""
    if core.loop is not None:
        _cores[core.loop] = core


def core_of(args: Namespace) -> Core:
    """The core of the running loop, else that of the process's loop, which is built on first use."""
    here = running_loop()
    if here is not None and here in _cores:
        return _cores[here]
    process = loops.loop()
    if process not in _cores:
        rewards = Rewards(args, make_scorer(Settings.from_namespace(args)))
        _cores[process] = standalone(args, rewards, None, process)
    return _cores[process]


def standalone(
    args: Namespace, scoring: Scoring, versions: Versions | None, loop: asyncio.AbstractEventLoop | None
) -> Core:
    """A core that asks the router at ``args.sglang_router_ip`` / ``_port``."""
    settings = Settings.from_namespace(args)
    tokenizer = load_tokenizer(settings)
    client = make_client(settings, HttpTransport())
    client.table.add_fixed(f"http://{args.sglang_router_ip}:{args.sglang_router_port}")
    encode = PromptEncoder.from_settings(settings, tokenizer).encode
    return Core(client, versions, encode, tokenizer, scoring, loop)


def make_scorer(settings: Settings) -> ProcessScorer:
    """The processes that a run's rewards are scored in."""
    return ProcessScorer(processes=settings.reward.reward_processes, timeout_s=settings.reward.reward_timeout_s)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
