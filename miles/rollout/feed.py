"""Finished groups in, batches for the trainer out: what `Rollouts` takes its batches from.

`WorkerFeed` drains the buffer that the worker fills; `function_feed.FunctionFeed` calls a user's own rollout function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from miles.loops import Changes
from miles.rollout.admission import Bounds
from miles.rollout.data_buffer import DataBuffer
from miles.rollout.ledger import Ledger
from miles.rollout.staleness import Versions
from miles.rollout.staleness_policy import StalenessPolicy
from miles.rollout.worker import RolloutWorker
from miles.types import FinishedGroup, Sample, iter_samples


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
    """Oldest groups first, no token older than the bound: what the policy evicts is issued again or given up."""

    def __init__(
        self,
        worker: RolloutWorker,
        buffer: DataBuffer,
        ledger: Ledger,
        versions: Versions,
        *,
        bounds: Bounds,
        policy: StalenessPolicy,
        retry_unused: bool,
    ) -> None:
        self.changes = buffer.changes
        self._worker = worker
        self._buffer = buffer
        self._ledger = ledger
        self._versions = versions
        self._bounds = bounds
        self._policy = policy
        self._retry_unused = retry_unused
        self.evicted = 0
        """Groups that got too old to be trained, sampled again or given up."""

    async def run(self) -> None:
        await self._worker.run()

    def restore(self, finished: Iterable[FinishedGroup]) -> None:
        """Groups that were finished before a restart are there to be trained."""
        for group in finished:
            self._buffer.put(group)

    async def take(self, step: int) -> list[FinishedGroup]:
        """The groups of the step that starts now. A cancelled take loses none: they leave the buffer at once or not."""
        await self.changes.wait_until(self._batch_is_ready)
        return self.take_nowait(self._bounds.batch_groups)

    def take_nowait(self, count: int) -> list[FinishedGroup]:
        """The ``count`` oldest finished groups, fewer where there are fewer, in issue order.

        Raises what stopped generation once nothing is left.
        """
        self._evict()
        self._buffer.has(1)
        groups = sorted(self._buffer.take(count), key=lambda g: g.issue_id)
        self._ledger.take(g.issue_id for g in groups)
        return [self._trained(group) for group in groups]

    def _trained(self, group: FinishedGroup) -> FinishedGroup:
        trained = self._policy.trained(group, self._versions.current)
        if trained is not group:
            self._ledger.mask(group.issue_id, trainable_tokens(group) - trainable_tokens(trained))
        return trained

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
        self._evict()
        return self._buffer.has(self._bounds.batch_groups) and self._policy.may_take(
            self._ledger.running, self._buffer.by_version(), self._versions
        )

    def _evict(self) -> None:
        for group in self._buffer.remove_if(lambda g: self._policy.evicts(g, self._versions.current)):
            self.evicted += 1
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


def trainable_tokens(group: FinishedGroup) -> int:
    """Response tokens that reach the loss."""
    return sum(sample.trainable_tokens().total() for sample in iter_samples(group.samples))
