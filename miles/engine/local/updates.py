"""New weights in by any of four ways, the model that serves swapped between two steps: whole, checked, with its label.

shared memory, folder      read and checked while generation goes on, then adopted
begin, buckets, end        kept aside until the last bucket is here, then adopted; a bucket by itself must be everything
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from torch import Tensor

from miles.engine.local.engine import PauseMode
from miles.engine.local.incoming import Incoming, receive
from miles.engine.local.model import Model
from miles.engine.local.service import Service
from miles.engine.weight_group import WeightGroup
from miles.errors import EngineRefused

GROUP_TIMEOUT_S = 30.0
"""Seconds that a group may take to meet, and one bucket to come."""


class Updates:
    """One update at a time. Whatever raises leaves the old weights serving under their old label."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._one_at_a_time = asyncio.Lock()
        self._serving: Model | None = None
        self._incoming: Incoming | None = None
        self._groups: dict[str, WeightGroup] = {}

    async def load(
        self, read: Callable[[], Mapping[str, Tensor]], label: str | None, mode: PauseMode | None = None
    ) -> None:
        """Takes the weights that ``read`` returns, which runs in a thread.

        ``mode``: what running requests do at the swap, as if generation had been paused for it alone; None: nothing.
        """
        async with self._one_at_a_time:
            model = await asyncio.to_thread(lambda: Model(self._service.config, read()))
            await self._adopt(model, label, mode)

    async def begin(self) -> None:
        """What arrives from here on is kept aside until `end`; what an earlier, unfinished update left is dropped."""
        async with self._one_at_a_time:
            self._incoming = await asyncio.to_thread(self._new)

    async def add(self, bucket: Callable[[], Mapping[str, Tensor]], label: str | None) -> None:
        """Takes the tensors that ``bucket`` returns, which runs in a thread. Outside of begin and end they must be all."""
        async with self._one_at_a_time:
            begun = self._incoming
            incoming = begun if begun is not None else await asyncio.to_thread(self._new)
            tensors = await asyncio.to_thread(bucket)
            await asyncio.to_thread(incoming.add, tensors)
            if begun is not None:
                incoming.label = label if label is not None else incoming.label
            else:
                await self._finish(incoming, label)

    async def end(self) -> None:
        """Adopts what arrived since `begin`, if it is everything."""
        async with self._one_at_a_time:
            incoming, self._incoming = self._incoming, None
            if incoming is None:
                raise EngineRefused("no update was begun; /begin_weight_update comes before /end_weight_update")
            await self._finish(incoming, incoming.label)

    async def relabel(self, label: str) -> None:
        """A new label: for the weights that are arriving, if an update has begun, else for those that serve."""
        async with self._one_at_a_time:
            if self._incoming is not None:
                self._incoming.label = label
            else:
                await self._service.between_steps(lambda: self._service.engine.set_version(label))

    # ---- process groups

    async def join(self, *, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Enters a group, in the place of one of the same name."""
        await self.leave(name)
        self._groups[name] = await asyncio.to_thread(
            lambda: WeightGroup(
                address=address, port=port, rank=rank, world_size=world_size, name=name, backend=backend,
                timeout_s=GROUP_TIMEOUT_S,
            )
        )  # fmt: skip

    async def leave(self, name: str) -> bool:
        """Leaves a group, which ends what still waits in it; whether there was one."""
        group = self._groups.pop(name, None)
        if group is not None:
            await asyncio.to_thread(group.close)
        return group is not None

    async def receive(
        self, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]], label: str | None
    ) -> None:
        """Takes a bucket that rank 0 of the group sends."""
        group = self._groups.get(name)
        if group is None:
            raise EngineRefused(f"group {name!r} is unknown; /init_weights_update_group comes first")
        await self.add(lambda: receive(group, names, dtypes, shapes), label)

    # ---- adoption

    def _new(self) -> Incoming:
        return Incoming(self._service.config, self._service.dtype)

    async def _finish(self, incoming: Incoming, label: str | None) -> None:
        model = await asyncio.to_thread(lambda: Model(self._service.config, incoming.complete()))
        await self._adopt(model, label, None)

    async def _adopt(self, model: Model, label: str | None, mode: PauseMode | None) -> None:
        """Swaps between two steps. The former weights are let go by a thread: that of the steps would lose milliseconds."""
        engine = self._service.engine

        def swap() -> None:
            paused = engine.paused
            if mode is not None:
                engine.pause(mode)
            engine.adopt(model, label)
            if not paused:
                engine.resume()

        await self._service.between_steps(swap)
        former, self._serving = [self._serving], model
        await asyncio.to_thread(former.clear)
