"""A request that joins in, the longest prefix of it that is computed already out: in a running row, or kept of an ended one.

Everything found was computed with the weights that serve now: running rows carry the epoch of theirs, and what is kept of
ended requests is dropped when the weights change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from miles.engine.local.kv_cache import KVCache
from miles.engine.local.sequence import Sequence

WORTH_TOKENS = 32
"""Shorter prefixes are computed again: copying and waiting for them costs more."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class _Kept:
    ids: Ids
    held: list[Tensor]


@dataclass(frozen=True)
class Found:
    """``length`` tokens of a running row or of a kept request; ``being_computed``: more will be there soon."""

    length: int = 0
    row: int | None = None
    held: list[Tensor] | None = None
    being_computed: bool = False

    def copy_into(self, cache: KVCache, row: int) -> None:
        if self.row is not None:
            cache.copy(self.row, row, self.length)
        elif self.held is not None:
            cache.write(row, self.held, self.length)


class PrefixCache:
    """Keeps ended requests up to ``max_tokens`` in all, the newest ones. 0: keeps nothing, finds nothing."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: deque[_Kept] = deque()
        self.tokens = 0

    def keep(self, sequence: Sequence, read: Callable[[], list[Tensor]]) -> None:
        """Keeps the cached tokens of an ended request, which ``read`` copies, and drops the oldest for them."""
        length = sequence.cached
        if not WORTH_TOKENS <= length <= self._max_tokens:
            return
        while self.tokens + length > self._max_tokens:
            self.tokens -= len(self._kept.popleft().ids)
        self._kept.append(_Kept(np.array(sequence.tokens(0, length)), read()))
        self.tokens += length

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0

    def find(self, sequence: Sequence, running: Seq[Sequence], epoch: int) -> Found:
        """The longest computed prefix; the last token is never part of it, because its logits are needed."""
        if self._max_tokens == 0 or sequence.length <= WORTH_TOKENS:
            return Found()
        head, ids, best, coming = sequence.tokens(0, WORTH_TOKENS), None, Found(), 0
        for row, other in enumerate(running):
            if other.epoch == epoch and other.length >= WORTH_TOKENS and other.tokens(0, WORTH_TOKENS) == head:
                ids = np.array(sequence.tokens(0, sequence.length - 1)) if ids is None else ids
                common = _common(ids, np.array(other.tokens(0, other.length)))
                coming = max(coming, common)
                if min(common, other.cached) > best.length and other.cached >= WORTH_TOKENS:
                    best = Found(min(common, other.cached), row=row)
        for kept in self._kept:
            if kept.ids[:WORTH_TOKENS].tolist() == head:
                ids = np.array(sequence.tokens(0, sequence.length - 1)) if ids is None else ids
                if (common := _common(ids, kept.ids)) > best.length:
                    best = Found(common, held=kept.held)
        if coming - best.length >= WORTH_TOKENS:
            return Found(being_computed=True)
        return best if best.length >= WORTH_TOKENS else Found()


def _common(a: Ids, b: Ids) -> int:
    """How many first numbers are the same."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
