"""Generated samples in, the same samples with rewards out: the port that reward functions stand behind.

The shipped ones are `rm_hub` (with its process pool) and, under virtual time, `DirectScoring`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from miles.types import Sample


class Scoring(Protocol):
    """Sets ``sample.reward`` on every sample. Raises `RewardFailed` or `HookError`; never turns a fault into a 0."""

    async def score(self, samples: Sequence[Sample], *, group: bool) -> None: ...


class DirectScoring:
    """Calls a plain function in place, ``answer_s`` seconds an answer: for virtual time and tests."""

    def __init__(self, reward: Callable[[Sample], Any], answer_s: float = 0.0) -> None:
        self._reward = reward
        self._answer_s = answer_s

    async def score(self, samples: Sequence[Sample], *, group: bool) -> None:
        if self._answer_s:
            await asyncio.sleep(self._answer_s * len(samples))
        for sample in samples:
            sample.reward = self._reward(sample)
