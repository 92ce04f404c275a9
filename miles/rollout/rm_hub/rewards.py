"""Samples in, their rewards out: which reward a sample wants, asked of the shipped types or of the user's function.

A sample's own wish comes before the run's: `reward_spec.custom_rm_path`, then ``--custom-rm-path``; `reward_spec.rm_type`,
then ``metadata["rm_type"]``, then ``--rm-type``. A custom function comes before any type. Cheap types are scored in
place, the others in processes; `remote_rm` asks a server.
"""

from __future__ import annotations

import asyncio
import inspect
from argparse import Namespace
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from miles.errors import HookError, MilesError, RewardFailed, SettingsError, UnknownReward
from miles.hooks import hook_failed, load_function
from miles.rollout.rm_hub.pool import ProcessScorer
from miles.rollout.rm_hub.remote import RemoteRewards
from miles.rollout.rm_hub.rm_types import Reward, as_reward, find, is_known, judged_part, known_types
from miles.rollout.rm_hub.scorer import Scorer
from miles.types import Sample

T = TypeVar("T")

_scorers: WeakKeyDictionary[asyncio.AbstractEventLoop, Scorer] = WeakKeyDictionary()
_remotes: WeakKeyDictionary[asyncio.AbstractEventLoop, RemoteRewards] = WeakKeyDictionary()


def use_scorer(scorer: Scorer) -> None:
    """Reward functions called on the running loop, by hooks too, share this scorer."""
    _scorers[asyncio.get_running_loop()] = scorer


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample.

    Raises RewardFailed where there is no verdict, HookError where the custom function fails, UnknownReward (a
    NotImplementedError) where the sample wants a type that doesn't exist.
    """
    path = _custom_path(args, sample)
    if path:
        return _reward(path, await _call_hook(path, args, sample, on=f"sample {sample.index}", **kwargs), sample)
    rm_type = _rm_type(args, sample)
    kind = find(rm_type)
    if kind.labelled and not sample.label:
        raise RewardFailed(f"sample {sample.index} has no label that {rm_type} could compare with; see --label-key")
    if kind.function is None:
        return await _ask_server(args, rm_type, sample)
    metadata = {key: sample.metadata[key] for key in kind.metadata if key in sample.metadata}
    try:
        return await _scorer(args).score(rm_type, sample.response, sample.label or "", metadata)
    except RewardFailed as error:
        raise RewardFailed(f"sample {sample.index}: {error}") from error


async def batched_async_rm(
    args: Namespace, samples: Sequence[Sample], inplace_set_reward_field: bool = False, **kwargs: Any
) -> list[Reward]:
    """The rewards of samples that belong together; a custom function that all of them share gets them in one call.

    Raises what `async_rm` raises, after every other sample has been scored, and HookError where the function returns
    another number of rewards.
    """
    paths = {_custom_path(args, s) for s in samples}
    path = paths.pop() if len(paths) == 1 else None
    if path:
        rewards = await _call_batch_hook(path, args, samples, **kwargs)
    else:
        rewards = await _settle([async_rm(args, s, **kwargs) for s in samples])
    if inplace_set_reward_field:
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
    return rewards


class Rewards:
    """Sets rewards on the samples of a run, with a scorer that it owns."""

    def __init__(self, args: Namespace, scorer: Scorer) -> None:
        self._args = args
        self.scorer = scorer

    async def score(self, samples: Sequence[Sample], *, group: bool) -> None:
        """Sets ``sample.reward``; ``group``: the samples are one group, scored together.

        Raises as `async_rm`; samples that got a verdict keep it.
        """
        use_scorer(self.scorer)
        if group:
            await batched_async_rm(self._args, samples, inplace_set_reward_field=True)
            return
        await _settle([self._score_one(s) for s in samples])

    async def _score_one(self, sample: Sample) -> None:
        sample.reward = await async_rm(self._args, sample)

    async def close(self) -> None:
        await self.scorer.close()
        remote = _remotes.pop(asyncio.get_running_loop(), None)
        if remote is not None:
            await remote.close()


def _custom_path(args: Namespace, sample: Sample) -> str | None:
    own = sample.reward_spec.custom_rm_path if sample.reward_spec else None
    return own or getattr(args, "custom_rm_path", None)


def _rm_type(args: Namespace, sample: Sample) -> str:
    own = sample.reward_spec.rm_type if sample.reward_spec else None
    rm_type = own or sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    if not rm_type or not is_known(rm_type):
        raise UnknownReward(
            [f"sample {sample.index} wants reward type {rm_type!r}: there are {known_types()}, and --custom-rm-path"]
        )
    return str(rm_type)


def _scorer(args: Namespace) -> Scorer:
    loop = asyncio.get_running_loop()
    if loop not in _scorers:
        _scorers[loop] = ProcessScorer(
            processes=getattr(args, "reward_processes", 1), timeout_s=getattr(args, "reward_timeout_s", 5.0)
        )
    return _scorers[loop]


async def _ask_server(args: Namespace, rm_type: str, sample: Sample) -> Reward:
    url = getattr(args, "rm_url", None)
    if not url:
        raise SettingsError(
            [f"sample {sample.index} wants reward type {rm_type}: --rm-url http://host:port/path is needed"]
        )
    loop = asyncio.get_running_loop()
    if loop not in _remotes:
        _remotes[loop] = RemoteRewards(
            concurrency=getattr(args, "rm_concurrency", 64),
            timeout_s=getattr(args, "rm_timeout_s", 60.0),
            retries=getattr(args, "rm_retries", 5),
        )
    response = judged_part(rm_type, sample.response)
    return await _remotes[loop].score(url, sample.prompt, response, sample.label)


async def _settle(scorings: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result. The first failure is raised once all are settled: cancelling the others would kill processes."""
    results = await asyncio.gather(*scorings, return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


# ---- the user's function


async def _call_batch_hook(path: str, args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    on = f"samples {samples[0].index} to {samples[-1].index}"
    values = await _call_hook(path, args, list(samples), on=on, **kwargs)
    if isinstance(values, str | dict) or not hasattr(values, "__len__") or len(values) != len(samples):
        count = f"{len(values)} rewards" if hasattr(values, "__len__") else f"{values!r}"
        raise HookError(f"{path} returned {count} for {len(samples)} samples ({on}); a list with one for each works")
    return [_reward(path, value, sample) for value, sample in zip(values, samples, strict=True)]


async def _call_hook(path: str, args: Namespace, subject: Any, *, on: str, **kwargs: Any) -> Any:
    function = load_function(path)
    try:
        if _is_async(function):
            return await function(args, subject, **kwargs)
        result = await _scorer(args).call(lambda: function(args, subject, **kwargs))
        return await result if inspect.isawaitable(result) else result
    except MilesError:
        raise
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise hook_failed(path, function, error, on) from error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _reward(path: str, value: Any, sample: Sample) -> Reward:
    try:
        return as_reward(value)
    except ValueError as error:
        raise HookError(f"{path} returned {value!r} for sample {sample.index}; {error}") from None
