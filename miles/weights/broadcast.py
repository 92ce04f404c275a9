"""Weights from the trainer's rank 0 into several engines at once, through one process group: who calls whom, and when.

    engine   begin ─────────────▶ meet ──▶ receive, receive, ... ──▶ label, end
    sender            open ─────▶ meet ──▶ send,    send, ...

Every wait has a limit on both sides: a member that dies or hangs ends the group for all, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from miles.engine.client import EngineClient
from miles.errors import EngineError
from miles.types import Weights

CALL_TIMEOUT_S = 75.0
"""More than meeting and one bucket may take at either end, so that the ends say why first."""
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Group:
    name: str
    sender: str
    urls: tuple[str, ...]


class Broadcast:
    """Sends to groups of engines, and keeps the group of the last publication for the next one.

    ``ranks_per_engine``: processes of one engine, each of which is a member.
    """

    def __init__(self, client: EngineClient, *, ranks_per_engine: int = 1) -> None:
        self._client = client
        self._ranks = ranks_per_engine
        self._names = count()
        self._standing: _Group | None = None

    async def send(self, weights: Weights, urls: Sequence[str]) -> None:
        """Gives ``weights`` to all ``urls``, in one group that stands until the members change. Raises EngineError.

        After an error nobody has the new weights under their label, and the group is gone.
        """
        wanted = (weights.path, tuple(sorted(urls)))
        group, self._standing = self._standing, None
        if group is not None and (group.sender, group.urls) != wanted:
            await self._close(group)
            group = None
        group = group or await self._open(*wanted)
        await self._send(weights, group)
        self._standing = group

    async def send_alone(self, weights: Weights, url: str) -> None:
        """Gives ``weights`` to one engine, in a group of its own that ends with it."""
        group = await self._open(weights.path, (url,))
        await self._send(weights, group)
        await self._close(group)

    async def _open(self, sender: str, urls: tuple[str, ...]) -> _Group:
        group = _Group(f"miles-weights-{next(self._names)}", sender, urls)
        size = 1 + self._ranks * len(urls)
        try:
            met = await self._call(sender, "/open", {"group_name": group.name, "world_size": size})
            joins = [
                (url, met | {"rank_offset": 1 + self._ranks * i, "world_size": size, "group_name": group.name})
                for i, url in enumerate(urls)
            ]
            await self._together(*((url, "/init_weights_update_group", body) for url, body in joins))
        except EngineError:
            await self._close(group)
            raise
        return group

    async def _send(self, weights: Weights, group: _Group) -> None:
        label = str(weights.version)
        try:
            buckets = (await self._call(group.sender, "/buckets", {"version": weights.version}))["buckets"]
            for index, bucket in enumerate(buckets):
                send = {"group_name": group.name, "version": weights.version, "bucket": index}
                receive = bucket | {"group_name": group.name, "flush_cache": False, "weight_version": label}
                await self._together(
                    (group.sender, "/send", send),
                    *((url, "/update_weights_from_distributed", receive) for url in group.urls),
                )
        except EngineError:
            await self._close(group)
            raise

    async def _together(self, *calls: tuple[str, str, dict[str, Any]]) -> None:
        """All at once, since each waits for the others. Raises the first failure, and lets the others go."""
        tasks = [asyncio.create_task(self._call(url, path, body)) for url, path, body in calls]
        try:  # no task group: in Python 3.11 it loses a cancellation that comes together with a failure
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
        for task in ended:
            task.result()

    async def _close(self, group: _Group) -> None:
        """Everybody leaves; who can't be asked has left, or will when its own time is up."""
        name = {"group_name": group.name}
        calls = [(group.sender, "/close"), *((url, "/destroy_weights_update_group") for url in group.urls)]
        await asyncio.gather(
            *(self._call(url, path, name, CLOSE_TIMEOUT_S) for url, path in calls), return_exceptions=True
        )

    async def _call(self, url: str, path: str, payload: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return await self._client.control(url, path, payload, timeout_s=timeout_s)
