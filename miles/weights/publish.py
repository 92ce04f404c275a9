"""New weights in, engines that serve them out: one publication to every engine, and catch-up for those that missed it.

    publish      every routed engine at once: pause, update, continue; whoever fails leaves the routing
    run          every engine aside, for as long as the run lives: wait for its health, give it the newest weights, route

    shm          one call: the engine checks the segment while it generates, and swaps between two steps
    disk         pause, update, continue
    broadcast    pause, flush, begin; buckets to all of them at once; label, end, continue

A failed update leaves the engine on its old weights under its old label, out of the routing. The newest publication stays
readable until a newer one is held by everybody, so catching up never needs a step of the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from miles.engine.client import EngineClient, backoff, version_of
from miles.errors import EngineError, EngineFailed, EngineRefused
from miles.types import Weights
from miles.weights.broadcast import Broadcast

UPDATE_TIMEOUT_S = {"shm": 10.0, "disk": 600.0, "broadcast": 60.0}
MOST_HELD = 3
"""An engine that leaves so many updates unanswered is offered one of these again, never more memory."""


class Publisher:
    """Drives the weight updates of all engines of a client's routing table."""

    def __init__(
        self, client: EngineClient, *, pause_mode: str, health_timeout_s: float = 30.0, ranks_per_engine: int = 1
    ) -> None:
        self._client = client
        self._table = client.table
        self._pause_mode = pause_mode
        self._health_timeout_s = health_timeout_s
        self._newest: Weights | None = None
        self._held: dict[str, dict[str, Weights]] = {}
        self._broadcast = Broadcast(client, ranks_per_engine=ranks_per_engine)
        self._updating: dict[str, asyncio.Lock] = {}

    def busy(self) -> frozenset[str]:
        """Paths that some engine may still read, and the newest publication: none of them may be written."""
        newest = {self._newest.path} if self._newest else set()
        return frozenset(newest.union(*(p for url, p in self._held.items() if url in self._table.engines)))

    def forget(self, url: str) -> None:
        """The process at ``url`` is gone: it reads nothing any more."""
        self._held.pop(url, None)

    async def publish(self, weights: Weights) -> None:
        """Gives ``weights`` to every engine in the routing; one that fails is set aside, and `run` brings it back."""
        self._newest = weights
        self._table.changes.notify()
        urls = [engine.url for engine in self._table.routed()]
        together = weights.kind == "broadcast" and await self._broadcast_to_all(weights, urls)
        async with asyncio.TaskGroup() as updates:
            for url in () if together else urls:
                updates.create_task(self._update_or_set_aside(url, weights), name=f"update-{url}")

    async def run(self) -> None:
        """Brings engines back that are aside, each by a task of its own; ends when cancelled."""
        recovering: set[str] = set()

        async def recover(url: str) -> None:
            try:
                await self._recover(url)
            finally:
                recovering.discard(url)

        def waiting() -> list[str]:
            return [e.url for e in self._table.aside() if e.url not in recovering] if self._newest else []

        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._table.changes.wait_until(lambda: bool(waiting()))
                for url in waiting():
                    recovering.add(url)
                    tasks.create_task(recover(url), name=f"recover-{url}")

    async def _recover(self, url: str) -> None:
        """Asks an engine that is aside until it answers and has the newest weights; then it is routed to again."""
        for delay in backoff():
            engine, weights = self._table.engines.get(url), self._newest
            if engine is None or engine.aside is None or weights is None:
                return
            try:
                await self._call(url, "/health", None, self._health_timeout_s)
                told = await self._call(url, "/model_info", None, self._health_timeout_s)
                if version_of(told.get("weight_version")) == weights.version:
                    await self._call(url, "/continue_generation", {}, self._health_timeout_s)
                else:
                    weights = await self._update(url, weights)
            except EngineError as error:
                engine.aside = str(error)
                await asyncio.sleep(delay)
                continue
            if weights is self._newest:
                self._table.restore(url, weights.version)
                return

    async def _update_or_set_aside(self, url: str, weights: Weights) -> None:
        try:
            await self._update(url, weights)
        except EngineError as error:
            self._table.set_aside(url, f"weight update failed: {error}")

    async def _update(self, url: str, weights: Weights) -> Weights:
        """One engine's update; returns what it was given. Raises `EngineError`; it then serves its old weights and label."""
        async with self._updating.setdefault(url, asyncio.Lock()):
            if weights.kind == "broadcast":
                async with self._prepared(url, weights):
                    await self._broadcast.send_alone(weights, url)
            elif weights.kind == "disk":
                await self._load_from_disk(url, weights)
            else:
                weights = await self._adopt_segment(url, weights)
        self._serves(url, weights)
        return weights

    def _serves(self, url: str, weights: Weights) -> None:
        engine = self._table.engines.get(url)
        if engine is not None:
            engine.version = weights.version

    # ---- shared memory and disk

    async def _adopt_segment(self, url: str, weights: Weights) -> Weights:
        held = self._held.setdefault(url, {})
        if weights.path not in held and len(held) >= MOST_HELD:
            weights = next(reversed(held.values()))
        payload = {"path": weights.path, "weight_version": str(weights.version), "mode": self._pause_mode}
        await self._offer(url, weights, "/update_weights_from_shared_memory", payload)
        return weights

    async def _load_from_disk(self, url: str, weights: Weights) -> None:
        payload = {
            "weight_version": str(weights.version),
            "model_path": weights.path,
            "flush_cache": self._pause_mode != "in_place",
        }
        timeout_s = UPDATE_TIMEOUT_S["disk"]
        await self._call(url, "/pause_generation", {"mode": self._pause_mode}, timeout_s)
        try:
            await self._offer(url, weights, "/update_weights_from_disk", payload)
        finally:
            await self._call(url, "/continue_generation", {}, timeout_s)

    async def _offer(self, url: str, weights: Weights, path: str, payload: dict[str, Any]) -> None:
        """An update from a path, which counts as read from now until the engine says that it reads another, or not this."""
        held = self._held.setdefault(url, {})
        new = weights.path not in held
        held[weights.path] = weights
        try:
            await self._call(url, path, payload, UPDATE_TIMEOUT_S[weights.kind])
        except (EngineRefused, EngineFailed):  # it answered: it did not take the path
            if new:
                held.pop(weights.path, None)
            raise
        self._held[url] = {weights.path: weights}

    # ---- broadcast

    async def _broadcast_to_all(self, weights: Weights, urls: list[str]) -> bool:
        """Whether everybody got them in one broadcast. One that failed is repeated to each alone: who is well gets it."""
        try:
            async with AsyncExitStack() as stack:
                for url in urls:
                    await stack.enter_async_context(self._updating.setdefault(url, asyncio.Lock()))
                async with AsyncExitStack() as prepared:
                    entering = (prepared.enter_async_context(self._prepared(url, weights)) for url in urls)
                    for failure in await asyncio.gather(*entering, return_exceptions=True):
                        if failure is not None:
                            raise failure
                    if urls:
                        await self._broadcast.send(weights, urls)
        except EngineError:
            return False
        for url in urls:
            self._serves(url, weights)
        return True

    @asynccontextmanager
    async def _prepared(self, url: str, weights: Weights) -> AsyncIterator[None]:
        """Generation paused and an update begun, for buckets to come; the label, the end and generation afterwards.

        A server without begin and end may be left with half of the weights: after a failure it stays paused until it has
        been given them all.
        """
        timeout_s = UPDATE_TIMEOUT_S["broadcast"]
        await self._call(url, "/pause_generation", {"mode": self._pause_mode}, timeout_s)
        whole = True
        try:
            if self._pause_mode != "in_place":
                await self._call(url, "/flush_cache", {}, timeout_s)
            whole = await self._knows(url, "/begin_weight_update")
            yield
            label = {"new_version": str(weights.version), "abort_all_requests": False}
            await self._call(url, "/update_weight_version", label, timeout_s)
            if whole:
                await self._call(url, "/end_weight_update", {}, timeout_s)
            whole = True
        finally:
            if whole:
                await self._call(url, "/continue_generation", {}, timeout_s)

    async def _knows(self, url: str, path: str) -> bool:
        """Whether the server has what is called."""
        try:
            await self._call(url, path, {}, UPDATE_TIMEOUT_S["broadcast"])
        except EngineRefused as error:
            if " answered 404" not in str(error):
                raise
            return False
        return True

    async def _call(self, url: str, path: str, payload: dict[str, Any] | None, timeout_s: float) -> Any:
        return await self._client.control(url, path, payload, timeout_s=timeout_s)
