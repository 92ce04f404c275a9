"""A sample or a group in, generated and scored out, on the run's engines: for rollout functions of users' own.

All of it may be awaited on any event loop of the process. Nothing is repeated here: what the engine client gives up on is
raised, and the siblings of a sample that fails are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from miles.errors import raising_first_cause
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generation import GenerateState, sampling_seed, stamp
from miles.types import Group, Sample, iter_samples

__all__ = ["GenerateState", "generate_and_rm", "generate_and_rm_group"]

GENERATED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
SampleDone = Callable[[asyncio.Task[Any]], object]


async def generate_and_rm(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generates what isn't generated yet, then sets the reward of what has none and wasn't aborted.

    With ``--group-rm`` rewards are left to `generate_and_rm_group`. Raises what engines, hooks and rewards raise.
    """
    return await state.on_its_loop(_sample(state, sample, sampling_params, evaluation))


async def generate_and_rm_group(
    state: GenerateState,
    group: Sequence[Sample],
    sampling_params: dict[str, Any],
    evaluation: bool = False,
    sample_done_callback: SampleDone | None = None,
) -> Group:
    """The samples of one prompt, on one engine where that serves, each with a seed of its own.

    ``sample_done_callback`` gets the finished task of each sample. Raises the first failure; siblings are cancelled.
    """
    return await state.on_its_loop(_group(state, group, sampling_params, evaluation, sample_done_callback))


async def _group(
    state: GenerateState,
    group: Sequence[Sample],
    params: dict[str, Any],
    evaluation: bool,
    done: SampleDone | None,
) -> Group:
    key = uuid4().hex
    for sample in group:
        sample.routing_key = sample.routing_key or key
    with raising_first_cause():
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(_sample(state, sample, params, evaluation)) for sample in group]
            for task in tasks:
                if done is not None:
                    task.add_done_callback(done)
    result: Group = [task.result() for task in tasks]
    if state.group_rm and not evaluation:
        await _score(state, list(iter_samples(result)), group=True)
    return result


async def _sample(
    state: GenerateState, sample: Sample, params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    result = sample if sample.status in GENERATED else await _generate(state, sample, params, evaluation)
    parts = result if isinstance(result, list) else [result]
    if evaluation or not state.group_rm:
        await _score(state, [s for s in parts if s.reward is None], group=False)
    return result


async def _generate(
    state: GenerateState, sample: Sample, params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    seed = {"sampling_seed": sampling_seed(state.rollout_seed, sample.index, 0)}
    async with state.generate_fn_semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        if sample.submit_version is None:
            sample.submit_version = state.version
        given = GenerateFnInput(state, sample, (seed if sample.index is not None else {}) | params, evaluation)
        result = (await state.generate_function(given)).samples
    for part in result if isinstance(result, list) else [result]:
        stamp(part, sample)
    return result


async def _score(state: GenerateState, samples: Sequence[Sample], *, group: bool) -> None:
    """Nothing is scored that was aborted; a group with an aborted sample isn't either."""
    aborted = [s for s in samples if s.status is Sample.Status.ABORTED]
    wanting = [s for s in samples if s.status is not Sample.Status.ABORTED]
    if wanting and not (group and aborted):
        await state.core.scoring.score(wanting, group=group)
