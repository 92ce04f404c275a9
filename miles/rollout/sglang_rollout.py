"""The names of the first era, with ``args`` in the place of a state: thin faces of `inference_rollout`."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub import single_turn
from miles.rollout.generation import GenerateState
from miles.rollout.inference_rollout import inference_rollout_common
from miles.types import Group, Sample

__all__ = ["GenerateState", "generate", "generate_and_rm_group"]

_states: WeakKeyDictionary[asyncio.AbstractEventLoop, GenerateState] = WeakKeyDictionary()


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One response to one sample, without a reward."""
    state = _state(args)
    given = GenerateFnInput(state, sample, sampling_params)
    result = (await state.on_its_loop(single_turn.generate(given))).samples
    assert isinstance(result, Sample)
    return result


async def generate_and_rm_group(
    args: Namespace, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """The samples of one prompt, generated and scored: `inference_rollout_common.generate_and_rm_group`."""
    return await inference_rollout_common.generate_and_rm_group(_state(args), group, sampling_params, evaluation)


def _state(args: Namespace) -> GenerateState:
    """One state for each loop and ``args``: it counts the requests that run."""
    loop = asyncio.get_running_loop()
    state = _states.get(loop)
    if state is None or state.args is not args:
        state = _states[loop] = GenerateState(args)
    return state
