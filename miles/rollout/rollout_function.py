"""A user's rollout or evaluation function in either form, as one coroutine: a failure of it names the hook and its line."""

from __future__ import annotations

import asyncio
import inspect
from argparse import Namespace
from typing import Any

from miles.errors import MilesError
from miles.hooks import hook_failed
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput


class RolloutFunction:
    """A class of the contract's form, constructed once, or ``f(args, rollout_id, data_source[, evaluation=True])``.

    Coroutines run on the caller's loop, plain functions on a thread.
    """

    def __init__(self, function: Any, path: str, args: Namespace, source: Any) -> None:
        self.path = path
        self._args = args
        self._source = source
        self._is_class = inspect.isclass(function)
        self._function = function
        if self._is_class:
            self._function = function(RolloutFnConstructorInput(args, source)).__call__

    async def __call__(self, given: RolloutFnTrainInput | RolloutFnEvalInput) -> Any:
        """What it returns. Raises HookError from what it raises."""
        arguments = (given,) if self._is_class else (self._args, given.rollout_id, self._source)
        more = {"evaluation": True} if given.evaluation and not self._is_class else {}
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(*arguments, **more)
            result = await asyncio.to_thread(self._function, *arguments, **more)
            return await result if inspect.isawaitable(result) else result
        except MilesError:
            raise
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            on = f"the evaluation after step {given.rollout_id}" if given.evaluation else f"step {given.rollout_id}"
            raise hook_failed(self.path, self._function, error, on) from error
