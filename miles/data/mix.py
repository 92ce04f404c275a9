"""Rows of several words in, (epoch, place) to row out: who gives how many of an epoch's draws, and which ones.

Without weights an epoch is every row of every word once. With weights it has as many draws, split in their ratio: a word
with share s of n draws gives about s x n of them (exactly as many in each epoch), going on through its own rows, shuffled
anew each time round, where the last epoch stopped. So a small file with a large weight is drawn again and again within an
epoch, and of a large one with a small weight each epoch takes the next part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np

from miles.data.cursor import Order, epoch_order
from miles.data.rows import Row, RowKeys
from miles.data.words import RowRange, Word, WordError


class Mix:
    """What is drawn from. ``weights`` None: every row is drawn once per epoch."""

    def __init__(
        self, sources: Sequence[Sequence[Row]], weights: Sequence[float] | None, *, shuffle: bool, seed: int
    ) -> None:
        sizes = [len(rows) for rows in sources]
        self._draws = sizes if weights is None else split(sum(sizes), weights)
        self._starts = [0, *accumulate(self._draws)]
        self._sources = sources
        self._own = (
            None if weights is None else [_OwnRows(n, shuffle, seed ^ (i + 1) << 32) for i, n in enumerate(sizes)]
        )
        self._order = None if weights is None or shuffle else _interleaved(self._draws)

    @classmethod
    def open(cls, words: Sequence[str], keys: RowKeys, *, shuffle: bool, seed: int) -> Mix:
        """The rows that words name. Raises DataError where one can't be used, or weights can't be kept."""
        if not words:
            raise WordError(
                "--prompt-data is not set: there is nothing to draw from", "--prompt-data prompts.jsonl works"
            )
        parsed = [Word.parse(text) for text in words]
        weights = [word.weight for word in parsed if word.weight is not None]
        if weights and len(weights) < len(parsed):
            raise WordError(f"{len(weights)} of {len(parsed)} words have a weight", "all of them or none works")
        return cls([word.open(keys) for word in parsed], weights or None, shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Draws per epoch: the rows of all words."""
        return self._starts[-1]

    def row(self, epoch: int, place: int) -> Row:
        """The row of one place of an epoch, ``0 <= place < len(self)``."""
        if self._order is not None:
            place = int(self._order[place])
        source = bisect_right(self._starts, place) - 1
        i = place - self._starts[source]
        if self._own is not None:
            i = self._own[source].at(epoch * self._draws[source] + i)
        return self._sources[source][i]

    def identity(self) -> list[list[int]]:
        """What gives places their meaning: rows, first row and, with weights, draws of each word.

        Nothing for one whole file, which a number of rows says all of.
        """
        firsts = [rows.first if isinstance(rows, RowRange) else 0 for rows in self._sources]
        if len(self._sources) == 1 and not any(firsts):
            return []
        draws = [[]] * len(firsts) if self._own is None else [[count] for count in self._draws]
        return [[len(r), first, *d] for r, first, d in zip(self._sources, firsts, draws, strict=True)]


class _OwnRows:
    """The rows of one word, over and over: which one is the n-th of all its draws."""

    def __init__(self, rows: int, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._order = lru_cache(maxsize=4)(partial(epoch_order.__wrapped__, rows, seed)) if shuffle else None

    def at(self, draw: int) -> int:
        epoch, place = divmod(draw, self._rows)
        return place if self._order is None else int(self._order(epoch)[place])


def split(draws: int, weights: Sequence[float]) -> list[int]:
    """``draws`` in the ratio of ``weights``: largest remainders first, ties to the earlier.

    Raises WordError where a weight is too small for a single draw.
    """
    exact = [draws * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: draws - sum(counts)]:
        counts[i] += 1
    for weight, share, count in zip(weights, exact, counts, strict=True):
        if not count:
            raise WordError(
                f"*{weight:g} of {sum(weights):g} is {share:.2g} of the {draws} draws of an epoch, which is none",
                f"*{sum(weights) / draws:.2g} works",
            )
    return counts


def _interleaved(draws: Sequence[int]) -> Order:
    """Places of an epoch that isn't shuffled: each word's draws evenly spread over it, in their order."""
    return np.argsort(np.concatenate([(np.arange(count) + 0.5) / count for count in draws]), kind="stable")
