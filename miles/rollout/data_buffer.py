"""Finished groups wait here between the slots and the drain: bounded, ordered by age, closable.

Putting never waits: admission stops new starts while the buffer is full, so the depth stays within the capacity plus the
groups that were open when it filled. Whoever waits for a batch is woken by each put and by `close`, and learns why.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping

from miles.errors import BufferClosed, MilesError
from miles.loops import Changes
from miles.rollout.ledger import OpenGroup
from miles.rollout.staleness import finished_group
from miles.types import FinishedGroup, Group

_Entry = tuple[float, float, int, FinishedGroup]


class DataBuffer:
    """Oldest version first, then the group whose newest token is oldest, then issue order."""

    def __init__(self, changes: Changes | None = None) -> None:
        self.changes = changes or Changes()
        self._heap: list[_Entry] = []
        self._closed = False
        self._cause: BaseException | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, group: FinishedGroup) -> None:
        """Raises `BufferClosed` once closed."""
        self._check_open()
        oldest = -1 if group.oldest_version is None else group.oldest_version
        newest = -1 if group.newest_version is None else group.newest_version
        heapq.heappush(self._heap, (oldest, newest, group.issue_id, group))
        self.changes.notify()

    async def accept(self, group: OpenGroup, samples: Group) -> None:
        """Puts a finished group of the worker's. Never waits."""
        self.put(finished_group(group.issue_id, samples))

    def remove_if(self, condition: Callable[[FinishedGroup], bool]) -> list[FinishedGroup]:
        """Takes every group out for which ``condition`` holds, oldest first."""
        removed = sorted(e for e in self._heap if condition(e[-1]))
        if removed:
            self._heap = [e for e in self._heap if not condition(e[-1])]
            heapq.heapify(self._heap)
        return [e[-1] for e in removed]

    async def wait_for(self, count: int) -> None:
        """Waits until ``count`` groups are here. Raises the cause, or `BufferClosed`, when nobody will come."""
        await self.changes.wait_until(lambda: self.has(count))

    def has(self, count: int) -> bool:
        """Whether ``count`` groups are here. Raises like `wait_for`."""
        self._check_open()
        return len(self) >= count

    def by_version(self) -> Mapping[int, int]:
        """How many groups there are of each oldest version."""
        return Counter(int(e[0]) for e in self._heap)

    def take(self, count: int) -> list[FinishedGroup]:
        """The ``count`` oldest groups, at once; fewer where there are fewer."""
        taken = [heapq.heappop(self._heap)[-1] for _ in range(min(count, len(self._heap)))]
        if taken:
            self.changes.notify()
        return taken

    def close(self, cause: BaseException | None = None) -> None:
        """Nobody will put or take any more. Twice is fine; the first cause stays."""
        if not self._closed:
            self._closed, self._cause = True, cause
            self.changes.notify()

    def _check_open(self) -> None:
        if isinstance(self._cause, MilesError):
            raise self._cause
        if self._closed:
            raise BufferClosed("nobody will put or take any more") from self._cause
