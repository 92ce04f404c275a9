"""A sample in, the same sample with its response out: what generate functions get, and how a user's own is called.

A user's function has one of two forms, told apart by its signature: ``f(input: GenerateFnInput) -> GenerateFnOutput``
(also a class whose instances are called so), or ``f(args, sample, sampling_params[, evaluation])``.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from miles.config import Settings
from miles.errors import HookError, MilesError
from miles.hooks import hook_failed, load_function
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.core import Core, core_of
from miles.rollout.generate_hub import single_turn
from miles.types import Sample

T = TypeVar("T")
SERVER_CONCURRENCY = 512
"""Requests per engine that `GenerateState.generate_fn_semaphore` lets through where ``args`` don't say."""
Generate = Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]


class GenerateState:
    """What every generate function may use: the engines, the tokenizer, the current version, the run's sampling.

    ``GenerateState(args)`` is what hooks construct; it stands on the run's `Core`, or on one built from ``args``.
    """

    def __init__(self, args: Namespace, core: Core | None = None) -> None:
        self.core = core or core_of(args)
        self.args = args
        self.client = self.core.client
        self.encode = self.core.encode
        self.tokenizer = self.core.tokenizer
        self.processor = None
        settings = Settings.from_namespace(args)
        self.sampling_params = settings.sampling_params()
        self.group_rm = settings.reward.group_rm
        self.rollout_seed = settings.data.rollout_seed
        self.generate_function = make_generate(settings.rollout.custom_generate_function_path)
        self.generate_fn_semaphore = asyncio.Semaphore(
            getattr(args, "sglang_server_concurrency", SERVER_CONCURRENCY) * settings.num_engines
        )
        self.aborted = False

    def reset(self) -> None:
        """Generation may start again after ``aborted`` was set."""
        self.aborted = False

    @property
    def version(self) -> int | None:
        """The weight version that a request starting now is submitted at; None outside a run."""
        return self.core.versions.current if self.core.versions else None

    def request_id(self, sample: Sample) -> str:
        """A new id for one request of a sample; repeats of the request keep it."""
        return f"{sample.index}.{next(self.core.requests)}"

    async def on_its_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits ``work`` where the engines' connections live, whichever loop the caller is on."""
        loop = self.core.loop
        if loop is None or loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def make_generate(run_path: str | None) -> Generate:
    """The sample's own generate function, else the run's, else the single-turn one."""

    @cache
    def of(path: str | None) -> Generate:
        return adapt_generate(load_function(path), path) if path else single_turn.generate

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        return await of(given.sample.generate_function_path or run_path)(given)

    of(run_path)
    return generate


def stamp(result: Sample, issued: Sample) -> None:
    """Gives a sample that a hook built itself the identity and the submit version of the one that was issued."""
    for name in ("group_index", "index", "submit_version"):
        if getattr(result, name) is None:
            setattr(result, name, getattr(issued, name))


def sampling_seed(rollout_seed: int, sample_index: int | None, attempt: int) -> int:
    """The seed of one attempt of one sample: a function of these alone, so restarts don't change what is sampled."""
    digest = hashlib.blake2s(f"{rollout_seed}/{sample_index}/{attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def adapt_generate(function: Any, path: str) -> Generate:
    """A user's generate function in either form, as the form with one input. Its failures become `HookError`."""
    if inspect.isclass(function):
        function = function()
    parameters = list(inspect.signature(function).parameters)
    legacy = len(parameters) >= 3 and parameters[0] != "input"

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        try:
            if legacy:
                more = {"evaluation": given.evaluation} if "evaluation" in parameters else {}
                result = await function(given.args, given.sample, given.sampling_params, **more)
            else:
                result = await function(given)
        except MilesError:
            raise
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            raise hook_failed(path, function, error, f"sample {given.sample.index}") from error
        output = result if isinstance(result, GenerateFnOutput) else GenerateFnOutput(result)
        made = output.samples if isinstance(output.samples, list) else [output.samples]
        if not made or not all(isinstance(s, Sample) for s in made):
            works = "a Sample, a list of Samples or a GenerateFnOutput works"
            raise HookError(f"{path} returned {output.samples!r:.100} for sample {given.sample.index}; {works}")
        return output

    return generate
