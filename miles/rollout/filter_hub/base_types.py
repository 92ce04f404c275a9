"""What a dynamic-sampling filter answers, and how a user's filter is asked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.errors import HookError
from miles.types import Group


@dataclass
class DynamicFilterOutput:
    """``keep`` the group or not; ``reason`` names the metric ``rollout/dynamic_filter/drop_{reason}``."""

    keep: bool
    reason: str | None = None


def call_dynamic_filter(function: Callable[..., Any], args: Namespace, group: Group) -> DynamicFilterOutput:
    """Asks a filter about a group; a plain bool is fine. Raises `HookError` naming the filter where it fails."""
    try:
        answer = function(args, group)
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise HookError(f"dynamic filter {getattr(function, '__qualname__', function)} failed: {error!r}") from error
    return answer if isinstance(answer, DynamicFilterOutput) else DynamicFilterOutput(bool(answer))
