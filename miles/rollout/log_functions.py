"""A batch or an evaluation in, the user's log function called on it: whether it says that nothing else is to be logged.

Metrics that the function adds to the ``extra`` that it gets are logged with the others, where others are logged.
"""

from __future__ import annotations

import asyncio
import inspect
from argparse import Namespace
from typing import Any

from miles.hooks import hook_failed, load_function, metrics_of
from miles.types import Sample


async def log_rollout(
    path: str, step: int, args: Namespace, samples: list[Sample], extra: dict[str, float], waited_s: float
) -> bool:
    """Calls ``f(rollout_id, args, samples, extra_metrics, rollout_time)``; ``waited_s``: how long the step waited for
    its batch. Raises HookError from what it raises."""
    return await _call(path, f"the batch of step {step}", extra, "rollout/", step, args, samples, extra, waited_s)


async def log_evaluation(
    path: str, step: int, args: Namespace, data: dict[str, dict[str, Any]], extra: dict[str, float]
) -> bool:
    """Calls ``f(rollout_id, args, data, extra_metrics)``; ``data`` is that of a `RolloutFnEvalOutput`. Raises HookError."""
    return await _call(path, f"the evaluation after step {step}", extra, "eval/", step, args, data, extra)


async def _call(path: str, on: str, extra: dict[str, float], prefix: str, *arguments: Any) -> bool:
    function = load_function(path)
    try:
        result = await asyncio.to_thread(function, *arguments)
        result = await result if inspect.isawaitable(result) else result
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise hook_failed(path, function, error, on) from error
    named = metrics_of(path, extra, prefix)
    extra.clear()
    extra.update(named)
    return bool(result)
