"""Generated samples in, the same samples with rewards out: the port that reward functions stand behind.

The shipped ones are `rm_hub` (with its process pool) and, under virtual time, `DirectScoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from miles.types import Sample


class Scoring(Protocol):
    """Sets ``sample.reward`` on every sample. Raises `RewardFailed` or `HookError`; never turns a fault into a 0."""

    async def score(self, samples: Sequence[Sample], *, group: bool) -> None: ...


class DirectScoring:
    """Calls a plain function in place: for virtual time and tests."""

    def __init__(self, reward: Callable[[Sample], Any]) -> None:
        self._reward = reward

    async def score(self, samples: Sequence[Sample], *, group: bool) -> None:
        for sample in samples:
            sample.reward = self._reward(sample)
