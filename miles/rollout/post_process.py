"""The groups of a batch in, the same groups with raw rewards and the rewards that are trained out: the user's hook."""

from __future__ import annotations

import asyncio
import copy
import inspect
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles.errors import HookError, MilesError
from miles.hooks import hook_failed, load_function
from miles.rollout.rm_hub.rm_types import as_reward
from miles.types import FinishedGroup, Sample, iter_samples

Rewards = list[float | None]
"""One per sample, in the order of the batch; None: unscored, nothing of it is trained."""


async def post_process(
    path: str, args: Namespace, groups: Sequence[FinishedGroup]
) -> tuple[tuple[FinishedGroup, ...], Rewards]:
    """Calls f(args, samples) -> (raw rewards, rewards) with all samples of a batch, on a thread unless it is async.

    The raw rewards, on copies of the samples, are what metrics show; the rewards are trained as they are, in the place
    of normalized ones. Raises HookError where the hook fails or doesn't return a pair with one number for each sample.
    """
    samples = [sample for group in groups for sample in iter_samples(group.samples)]
    raw, rewards = _pair(path, await call_with_samples(path, args, samples), len(samples))
    values = iter(raw)
    return tuple(replace(g, samples=[_rewarded(item, values) for item in g.samples]) for g in groups), rewards


async def call_with_samples(path: str, args: Namespace, samples: list[Sample]) -> Any:
    """What a hook f(args, samples) returns; on a thread unless it is async. Raises HookError where it fails."""
    function = load_function(path)
    try:
        if inspect.iscoroutinefunction(function):
            return await function(args, samples)
        return await asyncio.to_thread(function, args, samples)
    except MilesError:
        raise
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise hook_failed(path, function, error, f"the {len(samples)} samples of a batch") from error


def _pair(path: str, result: Any, count: int) -> tuple[Rewards, Rewards]:
    works = f"(raw rewards, rewards) with {count} numbers each works"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise HookError(f"{path} returned {result!r:.200}; {works}")
    raw, rewards = (list(values) if hasattr(values, "__len__") else None for values in result)
    if raw is None or rewards is None or {len(raw), len(rewards)} != {count}:
        counts = " and ".join("no list" if values is None else str(len(values)) for values in (raw, rewards))
        raise HookError(f"{path} returned {counts} rewards for {count} samples; {works}")
    return [_number(path, v) for v in raw], [_number(path, v) for v in rewards]


def _number(path: str, value: Any) -> float | None:
    try:
        number = as_reward(value)
    except ValueError:
        number = {}
    if isinstance(number, dict):
        raise HookError(f"{path} returned {value!r} among the rewards; finite numbers and None work")
    return number


def _rewarded(item: Sample | list[Sample], raw: Any) -> Sample | list[Sample]:
    if isinstance(item, list):
        return [copied for sample in item if isinstance(copied := _rewarded(sample, raw), Sample)]
    copied = copy.copy(item)
    copied.reward = next(raw)
    return copied
