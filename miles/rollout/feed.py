"""Finished groups in, batches for the trainer out: what `Rollouts` takes its batches from.

`WorkerFeed` drains the buffer that the worker fills; `function_feed.FunctionFeed` calls a user's own rollout function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from miles.loops import Changes
from miles.rollout.admission import Bounds
from miles.rollout.data_buffer import DataBuffer
from miles.rollout.ledger import Ledger
from miles.rollout.staleness import Versions, is_stale
from miles.rollout.worker import RolloutWorker
from miles.types import FinishedGroup, Sample


class Feed(Protocol):
    """Gives batches. ``changes`` is notified whenever something it waits for changed."""

    changes: Changes

    async def run(self) -> None: ...

    async def take(self, step: int) -> list[FinishedGroup]: ...

    def pause_starts(self) -> None: ...

    def resume_starts(self) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def open_prompts(self) -> list[list[Sample]]: ...

    def metrics(self) -> Mapping[str, float]:
        """What a hook reports beside the batch that was taken last."""
        ...


class WorkerFeed:
    """Oldest groups first, none older than the bound: what got too old is issued again or given up."""

    def __init__(
        self,
        worker: RolloutWorker,
        buffer: DataBuffer,
        ledger: Ledger,
        versions: Versions,
        *,
        bounds: Bounds,
        retry_unused: bool,
    ) -> None:
        self.changes = buffer.changes
        self._worker = worker
        self._buffer = buffer
        self._ledger = ledger
        self._versions = versions
        self._bounds = bounds
        self._retry_unused = retry_unused

    async def run(self) -> None:
        await self._worker.run()

    async def take(self, step: int) -> list[FinishedGroup]:
        """The groups of the step that starts now. A cancelled take loses none: they leave the buffer at once or not."""
        await self.changes.wait_until(self._batch_is_ready)
        return self.take_nowait(self._bounds.batch_groups)

    def take_nowait(self, count: int) -> list[FinishedGroup]:
        """The ``count`` oldest finished groups, fewer where there are fewer, in issue order.

        Raises what stopped generation once nothing is left.
        """
        self._evict_stale()
        self._buffer.has(1)
        groups = sorted(self._buffer.take(count), key=lambda g: g.issue_id)
        self._ledger.take(g.issue_id for g in groups)
        return groups

    def commit(self) -> None:
        """What was taken last has been trained."""
        self._versions.end_step()
        self._ledger.commit()
        self.changes.notify()

    def raise_version(self, version: int) -> None:
        """The engines have ``version`` now."""
        if version != self._versions.current:
            self._versions.raise_to(version, self._bounds.interval)
        self.changes.notify()

    @property
    def buffered(self) -> int:
        """Finished groups that wait."""
        return len(self._buffer)

    def _batch_is_ready(self) -> bool:
        self._evict_stale()
        return self._buffer.has(self._bounds.batch_groups)

    def _evict_stale(self) -> None:
        for group in self._buffer.remove_if(lambda g: is_stale(g, self._versions.current, self._bounds.staleness)):
            self.discard(group.issue_id, "stale")

    def discard(self, issue_id: int, reason: str) -> None:
        """A finished group that will not be trained: issued again where the settings say so and attempts are left."""
        if not (self._retry_unused and self._worker.issue_again(issue_id)):
            self._ledger.give_up(issue_id, reason)
            self.changes.notify()

    def pause_starts(self) -> None:
        self._worker.pause_starts()

    def resume_starts(self) -> None:
        self._worker.resume_starts()

    def status(self) -> dict[str, Any]:
        """What is running and waiting now, for the live view."""
        return {
            "buffer_groups": self.buffered,
            "buffer_capacity": self._bounds.buffer_groups,
            "running_samples": self._worker.running_samples,
            "generation_waits_for": self._worker.verdict(),
        }

    def open_prompts(self) -> list[list[Sample]]:
        return self._ledger.open_prompts()

    def metrics(self) -> Mapping[str, float]:
        return {}
