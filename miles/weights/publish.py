"""New weights in, engines that serve them out: one publication to every engine, and catch-up for those that missed it.

    publish      every routed engine at once: pause, update, continue; whoever fails leaves the routing
    run          every engine aside, for as long as the run lives: wait for its health, give it the newest weights, route

A failed update leaves the engine on its old weights under its old label, out of the routing. The newest publication stays
readable until a newer one is held by everybody, so catching up never needs the trainer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from miles.engine.client import EngineClient, backoff, version_of
from miles.errors import EngineError, EngineFailed, EngineRefused
from miles.types import Weights

UPDATE_PATH = {"shm": "/update_weights_from_shared_memory", "disk": "/update_weights_from_disk"}
UPDATE_TIMEOUT_S = {"shm": 10.0, "disk": 600.0}


class Publisher:
    """Drives the weight updates of all engines of a client's routing table."""

    def __init__(self, client: EngineClient, *, pause_mode: str, health_timeout_s: float = 30.0) -> None:
        self._client = client
        self._table = client.table
        self._pause_mode = pause_mode
        self._health_timeout_s = health_timeout_s
        self._newest: Weights | None = None
        self._held: dict[str, set[str]] = {}
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
        async with asyncio.TaskGroup() as updates:
            for engine in self._table.routed():
                updates.create_task(self._update_or_set_aside(engine.url, weights), name=f"update-{engine.url}")

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
                    await self._update(url, weights)
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

    async def _update(self, url: str, weights: Weights) -> None:
        """One engine's update. Raises `EngineError`; the engine then serves its old weights under its old label."""
        timeout_s = UPDATE_TIMEOUT_S[weights.kind]
        payload: dict[str, Any] = {"weight_version": str(weights.version)}
        if weights.kind == "disk":
            payload |= {"model_path": weights.path, "flush_cache": self._pause_mode != "in_place"}
        else:
            payload["path"] = weights.path
        async with self._updating.setdefault(url, asyncio.Lock()):
            await self._call(url, "/pause_generation", {"mode": self._pause_mode}, timeout_s)
            held = self._held.setdefault(url, set())
            before = set(held)
            held.add(weights.path)
            try:
                await self._call(url, UPDATE_PATH[weights.kind], payload, timeout_s)
            except (EngineRefused, EngineFailed):  # it answered: it did not take the path
                held &= before
                raise
            finally:
                await self._call(url, "/continue_generation", {}, timeout_s)
            self._held[url] = {weights.path}
        engine = self._table.engines.get(url)
        if engine is not None:
            engine.version = weights.version

    async def _call(self, url: str, path: str, payload: dict[str, Any] | None, timeout_s: float) -> Any:
        return await self._client.control(url, path, payload, timeout_s=timeout_s)
