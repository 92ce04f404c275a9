"""The rollout side of the ring: weights come in, batches and evaluations go out.

    ring calls     take_batch(step) ──▶ commit() ──▶ publish(weights) ──▶ ...      evaluate() between publish and take
    runs beside    feed (worker or user's function), publisher (engines that are aside)

Everything here lives on one event loop and knows nothing of Ray; the actor in `miles.cluster` is a thin face of it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from miles.engine.client import EngineClient
from miles.errors import raising_first_cause
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.evaluation import Evaluates
from miles.rollout.feed import Feed
from miles.rollout.filter_hub.sample_filter import SampleFilter
from miles.rollout.ledger import Ledger
from miles.rollout.staleness import Versions
from miles.types import Batch, Sample, Weights


class WeightPublisher(Protocol):
    """Gives weights to engines, and keeps those that missed them out of the routing until they have caught up."""

    async def publish(self, weights: Weights) -> None: ...

    async def run(self) -> None: ...

    def busy(self) -> frozenset[str]: ...


class Rollouts:
    """One per run. `run` must be running while the rest is called; when it fails, so does whoever waits here."""

    def __init__(
        self,
        *,
        feed: Feed,
        client: EngineClient,
        publisher: WeightPublisher,
        evaluator: Evaluates,
        ledger: Ledger,
        versions: Versions,
        sample_filter: SampleFilter | None = None,
    ) -> None:
        self.client = client
        self.feed = feed
        self._publisher = publisher
        self._evaluator = evaluator
        self._ledger = ledger
        self._versions = versions
        self._sample_filter = sample_filter
        self._closing = asyncio.Event()
        self._batch: Batch | None = None
        self._runs = False
        self._looked_at = (0.0, 0.0)

    @property
    def version(self) -> int:
        return self._versions.current

    async def run(self) -> None:
        """Generates until `close`. Raises the first cause of what stopped it otherwise."""
        self._looked_at = (asyncio.get_running_loop().time(), 0.0)
        self._runs = True
        try:
            with raising_first_cause():
                async with asyncio.TaskGroup() as tasks:
                    parts = [
                        tasks.create_task(self.feed.run(), name="feed"),
                        tasks.create_task(self._publisher.run(), name="publisher"),
                        tasks.create_task(self._ledger.store.run(), name="ledger"),
                    ]
                    await self._closing.wait()
                    for part in parts:
                        part.cancel()
        finally:
            self._runs = False
            await self.client.close()

    def close(self) -> None:
        """Ends `run`: no new starts, what runs is cancelled. Twice is fine."""
        self._closing.set()

    async def take_batch(self, step: int) -> Batch:
        """Waits for the groups of the step that starts now, oldest first. Raises what stopped generation."""
        groups = await self.feed.take(step)
        if self._sample_filter is not None:
            self._sample_filter(groups)
        self._batch = Batch(step, self.version, tuple(groups), self.feed.metrics())
        return self._batch

    async def commit(self) -> int:
        """The optimizer step of the batch last taken has ended. Returns how many groups it trained, once written."""
        self._versions.end_step()
        trained = self._ledger.commit(self._batch)
        self._batch = None
        self.feed.changes.notify()
        await self._ledger.store.settle()
        return trained

    async def publish(self, weights: Weights, steps_due: int) -> None:
        """Gives the engines new weights for ``steps_due`` training steps, then raises the version.

        Engines that fail to load them leave the routing.
        """
        await self._publisher.publish(weights)
        self._versions.raise_to(weights.version, steps_due)
        self._ledger.published(weights.version)
        self.feed.changes.notify()

    @property
    def untaken(self) -> int:
        """Groups that were issued and not handed to the trainer."""
        return self._ledger.untaken

    @property
    def taken(self) -> int:
        """Groups that were ever handed to the trainer."""
        return self._ledger.taken

    @property
    def generating(self) -> bool:
        """`run` runs and was not told to end."""
        return self._runs and not self._closing.is_set()

    def busy_weights(self) -> frozenset[str]:
        """Published weights that must not be overwritten."""
        return self._publisher.busy()

    async def evaluate(self, step: int) -> RolloutFnEvalOutput:
        """The scored samples of every evaluation set, all of the current version: no training group starts meanwhile.

        ``step`` is the training step (from 0) that ended last; 0 also before the first.
        """
        self.feed.pause_starts()
        try:
            return await self._evaluator.run(step)
        finally:
            self.feed.resume_starts()

    def status(self) -> dict[str, Any]:
        """What runs, waits and was lost: for the live view and the metrics."""
        counts = self._ledger.counts()
        return self.feed.status() | {
            "version": self.version,
            "outstanding_groups": counts.outstanding,
            "trained_groups": counts.trained,
            "given_up": counts.given_up,
            "wasted_tokens": counts.wasted_tokens,
            "masked_tokens": counts.masked_tokens,
            "length_bias": counts.length_bias,
            "masked_length_bias": counts.masked_length_bias,
            "engines": self.client.table.statistics(),
        }

    def engine_idle(self) -> float:
        """The share of engine time without any request since the last call, engines out of the routing included."""
        now, busy = asyncio.get_running_loop().time(), self.client.table.busy_s()
        (before, busy_before), self._looked_at = self._looked_at, (now, busy)
        passed = (now - before) * len(self.client.table.engines)
        return min(1.0, max(0.0, 1 - (busy - busy_before) / passed)) if passed > 0 else 0.0

    def open_prompts(self) -> list[list[Sample]]:
        """What a resumed run has to issue again."""
        return self.feed.open_prompts()
