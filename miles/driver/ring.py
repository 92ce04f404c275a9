"""Batches from the rollout side to the trainer, weights back to the engines: the loop of every program, sync or async.

    take_batch ──▶ train ──▶ commit ──▶ publish (every I steps) ──▶ evaluate, save (when due)
         ▲                                  │
         └────────── version + 1 ───────────┘

Generation goes on beside it; nothing here waits for the next batch before new weights go out. Synchronous training is
the same loop: admission lets nothing start between commit and publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from miles.types import Weights

Metrics = dict[str, float]


class RolloutSide(Protocol):
    """`miles.rollout.Rollouts`, or an actor with one inside."""

    async def take_batch(self, step: int) -> tuple[Any, Metrics]:
        """A batch as the trainer takes it (it may be a reference), and the metrics of its samples."""

    async def commit(self) -> None: ...

    async def busy_weights(self) -> frozenset[str]: ...

    async def publish(self, weights: Weights, steps_due: int) -> None: ...

    async def evaluate(self, step: int) -> Metrics:
        """``step``: the training step (from 0) that ended last; 0 also before the first."""

    async def covered(self, step: int) -> None:
        """The checkpoint after ``step`` is complete."""


class TrainSide(Protocol):
    """The trainer ranks, all of them. ``save`` writes everything that a resumed run needs."""

    async def train(self, data: Any, step: int) -> Metrics: ...

    async def write_weights(self, version: int, busy: frozenset[str]) -> Weights: ...

    async def save(self, step: int, folder: str) -> None: ...


class Checkpoints(Protocol):
    """Where checkpoints go: ``begin`` gives a folder to write into, ``finish`` makes it visible.

    ``asked_for``: somebody wants one now, beside those of the schedule.
    """

    def asked_for(self) -> bool: ...

    def begin(self, step: int) -> str: ...

    def finish(self, step: int, version: int) -> None: ...


class Watcher(Protocol):
    """Whoever looks on: `miles.observe.Observer`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def doing(self, state: Literal["waiting", "training", "publishing", "evaluating", "saving"]) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """When the ring does what. Steps count from 0; intervals are in steps, None: never.

    ``saves``: there is something to save.
    """

    start: int
    total: int
    version: int
    publish_interval: int
    eval_interval: int | None
    eval_before: bool
    save_interval: int | None
    saves: bool = True

    def publishes_after(self, step: int) -> bool:
        return (step + 1) % self.publish_interval == 0 or step + 1 == self.total

    def steps_until_publication(self, step: int) -> int:
        """Training steps from ``step`` on, up to the next publication."""
        return min(self.publish_interval - step % self.publish_interval, self.total - step)

    def evaluates_after(self, step: int) -> bool:
        if self.eval_interval is None:
            return False
        return (step + 1) % self.eval_interval == 0 or step + 1 == self.total

    def saves_after(self, step: int) -> bool:
        due = step + 1 == self.total or (self.save_interval is not None and (step + 1) % self.save_interval == 0)
        return due and self.saves


class Ring:
    """One run, from its first publication to its last evaluation."""

    def __init__(
        self,
        schedule: Schedule,
        rollouts: RolloutSide,
        trainer: TrainSide,
        checkpoints: Checkpoints,
        watcher: Watcher,
    ) -> None:
        self._schedule = schedule
        self._rollouts = rollouts
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._watcher = watcher
        self.version = schedule.version

    async def run(self) -> None:
        """Runs every step. Raises the first failure of either side."""
        schedule = self._schedule
        await self._publish(schedule.start)
        if schedule.eval_interval is not None and schedule.eval_before and schedule.start == 0:
            await self._evaluate(0)
        for step in range(schedule.start, schedule.total):
            await self._step(step)

    async def _step(self, step: int) -> None:
        now = asyncio.get_running_loop().time
        version, started = self.version, now()
        self._watcher.doing("waiting")
        data, sampled = await self._rollouts.take_batch(step)
        taken = now()
        self._watcher.doing("training")
        trained = await self._trainer.train(data, step)
        await self._rollouts.commit()
        committed = now()
        if self._schedule.publishes_after(step):
            await self._publish(step + 1)
        published = now()
        if self._checkpoints.asked_for() or self._schedule.saves_after(step):
            await self._save(step)
        times = {
            "rollout/step": step,
            "rollout/version": version,
            "perf/train_wait_time": taken - started,
            "perf/train_time": committed - taken,
            "perf/update_weights_time": published - committed,
            "perf/save_model_time": now() - published,
            "perf/step_time": now() - started,
            "perf/wait_time_ratio": (taken - started) / max(now() - started, 1e-9),
        }
        self._watcher.step(step, sampled | trained | times)
        if self._schedule.evaluates_after(step):
            await self._evaluate(step + 1)

    async def _publish(self, next_step: int) -> None:
        self._watcher.doing("publishing")
        weights = await self._trainer.write_weights(self.version + 1, await self._rollouts.busy_weights())
        await self._rollouts.publish(weights, self._schedule.steps_until_publication(next_step))
        self.version = weights.version

    async def _evaluate(self, step: int) -> None:
        self._watcher.doing("evaluating")
        started = asyncio.get_running_loop().time()
        metrics = await self._rollouts.evaluate(max(step - 1, 0))
        duration = asyncio.get_running_loop().time() - started
        self._watcher.evaluation(
            step, metrics | {"eval/weight_version": self.version, "eval/duration_seconds": duration}
        )

    async def _save(self, step: int) -> None:
        self._watcher.doing("saving")
        folder = self._checkpoints.begin(step)
        await self._trainer.save(step, folder)
        self._checkpoints.finish(step, self.version)
        await self._rollouts.covered(step)
