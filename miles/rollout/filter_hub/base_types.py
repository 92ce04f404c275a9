"""What a dynamic-sampling filter answers, and how a user's filter is asked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.errors import HookError
from miles.hooks import hook_failed
from miles.types import Group, first_sample


@dataclass
class DynamicFilterOutput:
    """``keep`` the group or not; ``reason`` names the metric ``rollout/dynamic_filter/drop_{reason}``."""

    keep: bool
    reason: str | None = None


def call_dynamic_filter(function: Callable[..., Any], args: Namespace, group: Group) -> DynamicFilterOutput:
    """Asks a filter about a group; a plain bool is fine. Raises `HookError` where it fails or answers neither."""
    name = f"dynamic filter {getattr(function, '__qualname__', function)}"
    on = f"the group of sample {first_sample(group).index}"
    try:
        answer = function(args, group)
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise hook_failed(name, function, error, on) from error
    if isinstance(answer, DynamicFilterOutput):
        return answer
    if isinstance(answer, bool) or type(answer).__name__ in ("bool_", "bool"):
        return DynamicFilterOutput(bool(answer))
    raise HookError(f"{name} answered {answer!r} for {on}; a bool or a DynamicFilterOutput works")
