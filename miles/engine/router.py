"""The routing table: which engine takes the next request, who is set aside and why.

An engine is routed to only while it holds the current weights and answers. `set_aside` takes it out, `restore` brings it
back with a clean record; requests that find nobody wait here, and whoever restores or adds an engine wakes them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from miles.errors import NoEngine
from miles.loops import Changes

STICKY_KEYS = 100_000
FAILURES_IN_A_ROW = 3


@dataclass
class Engine:
    """One engine of the table. ``aside`` is why it gets no requests (None: it is routed to).

    A ``fixed`` one is a router that somebody else looks after: it is never set aside.
    """

    url: str
    version: int | None = None
    fixed: bool = False
    aside: str | None = "not started"
    running: int = 0
    failures: int = 0
    busy_s: float = 0.0
    """Seconds with at least one request, up to when one last began or ended."""
    changed_at: float = 0.0

    def run(self, requests: int, now: float) -> None:
        """So many requests begin (negative: end) now."""
        if self.running:
            self.busy_s += now - self.changed_at
        self.running, self.changed_at = self.running + requests, now


class RoutingTable:
    """Sticky, least-loaded routing over the engines that may serve."""

    def __init__(self, *, engine_wait_s: float) -> None:
        self.engines: dict[str, Engine] = {}
        self.changes = Changes()
        self._engine_wait_s = engine_wait_s
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._first_cause: str | None = None

    # ---- who is there

    def add(self, url: str) -> Engine:
        """Enters an engine, set aside until `restore`. The same address again starts with a clean record."""
        self.engines[url] = engine = Engine(url)
        self.changes.notify()
        return engine

    def add_fixed(self, url: str) -> None:
        """Enters the address of a router that somebody else looks after."""
        self.engines[url] = Engine(url, fixed=True, aside=None)
        self.changes.notify()

    def remove(self, url: str) -> None:
        self.engines.pop(url, None)
        self.changes.notify()

    def set_aside(self, url: str, why: str) -> None:
        """No more requests for this engine until it is restored; running ones go on."""
        engine = self.engines.get(url)
        if engine is None or engine.fixed or engine.aside is not None:
            return
        engine.aside = why
        if not self.routed():
            self._first_cause = self._first_cause or f"{url}: {why}"
        self.changes.notify()

    def restore(self, url: str, version: int | None) -> None:
        """The engine answers and holds the weights of ``version``."""
        engine = self.engines.get(url)
        if engine is not None:
            engine.aside, engine.version, engine.failures = None, version, 0
            self._first_cause = None
            self.changes.notify()

    def report(self, url: str, failure: str | None) -> None:
        """An engine answered, well (None) or not; three bad answers in a row set it aside."""
        engine = self.engines.get(url)
        if engine is not None:
            engine.failures = engine.failures + 1 if failure else 0
            if failure and engine.failures >= FAILURES_IN_A_ROW:
                self.set_aside(url, failure)

    def routed(self) -> list[Engine]:
        return [e for e in self.engines.values() if e.aside is None]

    def aside(self) -> list[Engine]:
        return [e for e in self.engines.values() if e.aside is not None]

    def busy_s(self) -> float:
        """Seconds that the engines had requests up to now, summed."""
        now = asyncio.get_running_loop().time()
        for engine in self.engines.values():
            engine.run(0, now)
        return sum(e.busy_s for e in self.engines.values())

    def statistics(self) -> list[dict[str, Any]]:
        """A snapshot: address, version, running requests and why an engine is aside."""
        return [dict(vars(e)) for e in self.engines.values()]

    # ---- who takes the next request

    def lease(self, routing_key: str | None = None) -> Lease:
        """The engine for one request: ``async with`` waits while nobody is routed to.

        Raises `NoEngine`, with the first cause, when that lasts longer than ``engine_wait_s``.
        """
        return Lease(self, routing_key)

    async def take(self, routing_key: str | None) -> Engine:
        """The engine for one request, which runs on it from now on. Raises as `lease`."""
        if not self.routed():
            await self._wait_for_engine()
        engine = self._choose(routing_key)
        engine.run(1, asyncio.get_running_loop().time())
        return engine

    async def _wait_for_engine(self) -> None:
        try:
            async with asyncio.timeout(self._engine_wait_s):
                await self.changes.wait_until(lambda: bool(self.routed()))
        except TimeoutError:
            cause = self._first_cause or "; ".join(f"{e.url}: {e.aside}" for e in self.aside()) or "none was added"
            raise NoEngine(
                f"no engine was in the routing for {self._engine_wait_s:g} s (--engine-wait-s); first cause: {cause}"
            ) from None

    def _choose(self, routing_key: str | None) -> Engine:
        if routing_key is not None:
            kept = self.engines.get(self._sticky.get(routing_key, ""))
            if kept is not None and kept.aside is None:
                self._sticky.move_to_end(routing_key)
                return kept
        engine = min(self.routed(), key=lambda e: e.running)
        if routing_key is not None:
            self._sticky[routing_key] = engine.url
            if len(self._sticky) > STICKY_KEYS:
                self._sticky.popitem(last=False)
        return engine


class Lease:
    """One request's engine, for the time of an ``async with``."""

    __slots__ = ("_engine", "_key", "_table")

    def __init__(self, table: RoutingTable, key: str | None) -> None:
        self._table, self._key = table, key

    async def __aenter__(self) -> Engine:
        self._engine = await self._table.take(self._key)
        return self._engine

    async def __aexit__(self, *failure: object) -> None:
        self._engine.run(-1, asyncio.get_running_loop().time())
