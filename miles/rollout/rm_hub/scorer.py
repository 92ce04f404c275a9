"""The port that reward code stands behind, and its implementation in place: type, reply, label, metadata in, a reward out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from miles.errors import RewardFailed
from miles.rollout.rm_hub.rm_types import Reward, score_in_place

NO_METADATA: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ScorerStatistics:
    """A snapshot. ``scored`` counts verdicts, those at the limit (``timed_out``, a reward of 0) included; ``failed``
    answers got none."""

    scored: int = 0
    timed_out: int = 0
    failed: int = 0


class Scorer(Protocol):
    """Where reward code runs."""

    async def score(self, rm_type: str, response: str, label: str, metadata: Mapping[str, Any] = NO_METADATA) -> Reward:
        """The reward of one answer by a shipped type. Raises RewardFailed where there is no verdict."""
        ...

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a user's plain function returns; what it raises comes through."""
        ...

    def statistics(self) -> ScorerStatistics: ...

    async def close(self) -> None:
        """Ends whatever was started. Twice is fine."""
        ...


class DirectScorer:
    """Calls reward code in place, without a limit: for virtual time, where each answer takes ``answer_s`` seconds."""

    def __init__(self, answer_s: float = 0.0) -> None:
        self._answer_s = answer_s
        self._scored = 0
        self._failed = 0

    async def score(self, rm_type: str, response: str, label: str, metadata: Mapping[str, Any] = NO_METADATA) -> Reward:
        if self._answer_s:
            await asyncio.sleep(self._answer_s)
        try:
            reward = score_in_place(rm_type, response, label, metadata)
        except RewardFailed:
            self._failed += 1
            raise
        self._scored += 1
        return reward

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def statistics(self) -> ScorerStatistics:
        return ScorerStatistics(scored=self._scored, failed=self._failed)

    async def close(self) -> None:
        return
