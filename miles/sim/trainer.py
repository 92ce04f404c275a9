"""A trainer that only takes time: tokens in, virtual seconds and the next weights' name out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.conversion import to_train_data
from miles.rollout.lineage import RolloutState
from miles.rollout.rollouts import Rollouts
from miles.types import Batch, Weights, iter_samples


@dataclass
class FakeTrainer:
    """Takes ``step_s`` seconds a step plus ``token_s`` for each response token, shared by ``devices``; keeps the batches."""

    step_s: float = 0.5
    token_s: float = 0.0
    devices: int = 1
    write_s: float = 0.0
    reward_key: str | None = None
    batches: list[Batch] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    rollouts: DirectRollouts | None = None

    async def train(self, data: Batch, step: int) -> dict[str, float]:
        tokens = sum(to_train_data(data.groups, self.reward_key)["response_lengths"])
        await asyncio.sleep(self.step_s + self.token_s * tokens / self.devices)
        self.batches.append(data)
        return {"train/tokens": float(tokens)}

    async def write_weights(self, version: int, busy: frozenset[str]) -> Weights:
        await asyncio.sleep(self.write_s)
        path = next(p for p in (f"weights-{k}" for k in range(len(busy) + 1)) if p not in busy)
        return Weights(version, "shm", path)

    async def save(self, step: int, folder: str) -> None:
        """Keeps nothing of its own: its weights are their version. The rollout side saves what it has."""
        self.saved.append(step)
        if self.rollouts is not None:
            await self.rollouts.save(step, folder)

    def ages(self) -> list[int]:
        """Age of every trained token's span."""
        return [
            batch.version - version
            for batch in self.batches
            for group in batch.groups
            for sample in iter_samples(group.samples)
            for version in sample.trainable_tokens()
            if version is not None
        ]


@dataclass
class DirectRollouts:
    """`Rollouts` as the ring sees them, without an actor between."""

    inner: Rollouts
    state: RolloutState | None = None
    evaluations: list[RolloutFnEvalOutput] = field(default_factory=list)

    async def take_batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        batch = await self.inner.take_batch(step)
        return batch, dict(batch.metrics)

    async def commit(self) -> None:
        await self.inner.commit()

    async def busy_weights(self) -> frozenset[str]:
        return self.inner.busy_weights()

    async def publish(self, weights: Weights, steps_due: int) -> None:
        await self.inner.publish(weights, steps_due)

    async def save(self, step: int, folder: str) -> None:
        if self.state is not None:
            await self.state.save(step, Path(folder), self.inner.open_prompts())

    async def covered(self, step: int) -> None:
        if self.state is not None:
            await self.state.covered(step)

    async def evaluate(self, step: int) -> dict[str, float]:
        self.evaluations.append(await self.inner.evaluate(step))
        return dict(self.evaluations[-1].metrics or {})
