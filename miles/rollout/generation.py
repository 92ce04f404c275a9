"""A sample in, the same sample with its response out: what generate functions get, and how a user's own is called.

A user's function has one of two forms, told apart by its signature: ``f(input: GenerateFnInput) -> GenerateFnOutput``
(also a class whose instances are called so), or ``f(args, sample, sampling_params[, evaluation])``.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from miles.engine.client import EngineClient
from miles.errors import HookError, MilesError
from miles.hooks import hook_failed
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.staleness import Versions
from miles.types import Message, Sample

Encode = Callable[[str | list[Message], Any], list[int]]
Generate = Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]


class GenerateState:
    """What every generate function may use: the engines, the tokenizer's encoder, the current version."""

    def __init__(
        self, args: Namespace, client: EngineClient, versions: Versions, encode: Encode, tokenizer: Any = None
    ) -> None:
        self.args = args
        self.client = client
        self.encode = encode
        self.tokenizer = tokenizer
        self._versions = versions
        self._requests = itertools.count()

    @property
    def version(self) -> int:
        """The weight version that a request starting now is submitted at."""
        return self._versions.current

    def request_id(self, sample: Sample) -> str:
        """A new id for one request of a sample; repeats of the request keep it."""
        return f"{sample.index}.{next(self._requests)}"


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
