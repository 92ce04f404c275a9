"""Evaluation prompts in, their scored samples out, all of one weight version; training starts wait meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from miles.errors import EngineFailed, EngineRefused, HookError, RewardFailed
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generation import Generate, GenerateState, sampling_seed
from miles.rollout.scoring import Scoring
from miles.types import Group, Sample


@dataclass(frozen=True)
class EvalSet:
    """One evaluation file: ``groups`` are its prompts, each as often as it is sampled; samples are never reused."""

    name: str
    groups: Sequence[list[Sample]]


class Evaluator:
    """Runs evaluation sets on the shared engines, at most ``slots`` samples at a time."""

    def __init__(
        self,
        *,
        sets: Sequence[EvalSet],
        state: GenerateState,
        generate: Generate,
        scoring: Scoring,
        sampling_params: dict[str, Any],
        seed: int,
        slots: int,
        budget: int,
        timeout_s: float,
    ) -> None:
        self._sets = sets
        self._state = state
        self._generate = generate
        self._scoring = scoring
        self._params = sampling_params
        self._seed = seed
        self._slots = slots
        self._budget = budget
        self._timeout_s = timeout_s

    async def run(self) -> dict[str, list[Group]]:
        """The scored groups of every set. A sample that fails past its budget comes back FAILED, without a reward."""
        self._free = asyncio.Semaphore(self._slots)
        async with asyncio.TaskGroup() as samples:
            tasks = {
                s.name: [[samples.create_task(self._sample(x)) for x in group] for group in s.groups]
                for s in self._sets
            }
        return {name: [[t.result() for t in group] for group in groups] for name, groups in tasks.items()}

    async def _sample(self, prototype: Sample) -> Sample:
        async with self._free:
            return await self._attempts(prototype)

    async def _attempts(self, prototype: Sample) -> Sample:
        for attempt in range(self._budget + 1):
            sample = deepcopy(prototype)
            sample.submit_version = self._state.version
            seed = sampling_seed(self._seed, sample.index, attempt)
            given = GenerateFnInput(self._state, sample, self._params | {"sampling_seed": seed}, evaluation=True)
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = (await self._generate(given)).samples
                done = result[-1] if isinstance(result, list) else result
                if done.status not in (Sample.Status.ABORTED, Sample.Status.FAILED):
                    await self._scoring.score([done], group=False)
                    return done
            except EngineRefused:
                break
            except (TimeoutError, EngineFailed, HookError, RewardFailed):
                continue
        failed = deepcopy(prototype)
        failed.status = Sample.Status.FAILED
        return failed
