"""Evaluation prompts in, their scored samples out, all of one weight version; training starts wait meanwhile.

`Evaluator` runs the sets of the settings, `FunctionEvaluator` a function of the user's; both give a `RolloutFnEvalOutput`,
whose ``data`` has for each set, by name, ``rewards`` (None: unscored), ``truncated`` and ``samples``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.errors import EngineFailed, EngineRefused, HookError, RewardFailed
from miles.hooks import metrics_of
from miles.rollout.base_types import GenerateFnInput, RolloutFnEvalInput, RolloutFnEvalOutput
from miles.rollout.generation import Generate, GenerateState, sampling_seed
from miles.rollout.rollout_function import RolloutFunction
from miles.rollout.scoring import Scoring
from miles.types import Group, Sample


@dataclass(frozen=True)
class EvalSet:
    """One evaluation file: ``groups`` are its prompts, each as often as it is sampled; samples are never reused.

    ``skipped`` says of each row that was left out why; ``sampling_params`` are those that this set has of its own.
    """

    name: str
    groups: Sequence[list[Sample]]
    skipped: Sequence[str] = ()
    sampling_params: Mapping[str, Any] = field(default_factory=dict)


class Evaluates(Protocol):
    """What evaluates the policy after training step ``step`` (from 0; 0 also before the first)."""

    async def run(self, step: int) -> RolloutFnEvalOutput: ...


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
        reward_key: str | None,
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
        self._reward_key = reward_key
        self._seed = seed
        self._slots = slots
        self._budget = budget
        self._timeout_s = timeout_s

    async def run(self, step: int) -> RolloutFnEvalOutput:
        """The scored samples of every set. A sample that fails past its budget comes back FAILED, without a reward."""
        self._free = asyncio.Semaphore(self._slots)
        async with asyncio.TaskGroup() as samples:
            tasks = {
                s.name: [[samples.create_task(self._sample(x, s.sampling_params)) for x in group] for group in s.groups]
                for s in self._sets
            }
        done = {name: [t.result() for group in groups for t in group] for name, groups in tasks.items()}
        return RolloutFnEvalOutput({name: self._data_of(samples) for name, samples in done.items()})

    def _data_of(self, samples: list[Sample]) -> dict[str, Any]:
        return {
            "rewards": [s.reward_value(self._reward_key) for s in samples],
            "truncated": [s.status is Sample.Status.TRUNCATED for s in samples],
            "samples": samples,
        }

    async def _sample(self, prototype: Sample, own: Mapping[str, Any]) -> Sample:
        async with self._free:
            return await self._attempts(prototype, self._params | dict(own))

    async def _attempts(self, prototype: Sample, params: dict[str, Any]) -> Sample:
        for attempt in range(self._budget + 1):
            sample = deepcopy(prototype)
            sample.submit_version = self._state.version
            seed = sampling_seed(self._seed, sample.index, attempt)
            given = GenerateFnInput(self._state, sample, params | {"sampling_seed": seed}, evaluation=True)
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


class FunctionEvaluator:
    """Calls a user's evaluation function: the sets, what they are sampled with and their scores are its own."""

    def __init__(self, function: RolloutFunction, state: GenerateState) -> None:
        self._function = function
        self._state = state

    async def run(self, step: int) -> RolloutFnEvalOutput:
        """What it returns, checked. Raises HookError where that is no evaluation."""
        path, version = self._function.path, str(self._state.version)
        result = await self._function(RolloutFnEvalInput(step, self._state, version))
        output = result if isinstance(result, RolloutFnEvalOutput) else RolloutFnEvalOutput(result)
        if not isinstance(output.data, dict) or not all(_is_set(found) for found in output.data.values()):
            works = "a dict of set names works, each with its rewards and, of the same length, truncated and samples"
            raise HookError(f"{path} returned {output.data!r:.200} for the evaluation after step {step}; {works}")
        return RolloutFnEvalOutput(output.data, metrics_of(path, output.metrics, "eval/"))


def _is_set(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), list):
        return False
    count = len(found["rewards"])
    return all(found.get(key) is None or len(found[key]) == count for key in ("truncated", "samples"))


def eval_groups(data: dict[str, Any]) -> list[Group]:
    """The samples of one set by prompt, rewarded as ``data`` says; a set without samples has one without tokens each."""
    truncated = data.get("truncated") or [False] * len(data["rewards"])
    made = [Sample(status=Sample.Status.TRUNCATED if t else Sample.Status.COMPLETED) for t in truncated]
    groups: dict[Any, Group] = {}
    for position, (sample, reward) in enumerate(zip(data.get("samples") or made, data["rewards"], strict=True)):
        scored = copy(sample)
        scored.reward = reward
        key = ("alone", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(scored)
    return list(groups.values())
