"""Sample lengths in, micro-batches of every rank out: pure and deterministic.

first_fit_decreasing   samples → bins within a token limit
split_largest          more bins, so that every rank gets the same number of them, none empty
deal                   bins → ranks: the k-th micro-batches of all ranks are of like size, because FSDP keeps ranks in step
"""

from __future__ import annotations

from collections.abc import Sequence

Bin = list[int]
"""Sample indices of one micro-batch, longest sample first."""


def longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def first_fit_decreasing(lengths: Sequence[int], limit: int, *, padded: bool = False) -> list[Bin]:
    """Bins of at most ``limit`` tokens; a sample above the limit gets a bin of its own.

    ``padded``: every sample takes as much room as the longest of its bin, and joins only if it is at least half as long,
    so that padding stays the smaller part. Otherwise the sum counts.
    """
    bins: list[Bin] = []
    room: list[int] = []
    for i in longest_first(lengths):
        for b, members in enumerate(bins):
            width = lengths[members[0]]
            need = width if padded else lengths[i]
            if need <= room[b] and not (padded and 2 * lengths[i] < width):
                members.append(i)
                room[b] -= need
                break
        else:
            bins.append([i])
            room.append(limit - lengths[i])
    return bins


def fixed_size(lengths: Sequence[int], samples: int) -> list[Bin]:
    """Bins of ``samples`` samples of like length."""
    order = longest_first(lengths)
    return [order[i : i + samples] for i in range(0, len(order), samples)]


def split_largest(bins: Sequence[Bin], lengths: Sequence[int], count: int) -> list[Bin]:
    """Halves the largest bin of several samples until there are ``count`` bins.

    Raises ValueError where there are fewer samples than bins wanted.
    """
    bins = list(bins)
    while len(bins) < count:
        divisible = [b for b, members in enumerate(bins) if len(members) > 1]
        if not divisible:
            raise ValueError(f"{sum(map(len, bins))} samples can't fill {count} bins")
        largest = max(divisible, key=lambda b: sum(lengths[i] for i in bins[b]))
        members = bins[largest]
        half = (len(members) + 1) // 2
        bins[largest : largest + 1] = [members[:half], members[half:]]
    return bins


def deal(bins: Sequence[Bin], lengths: Sequence[int], ranks: int) -> list[list[Bin]]:
    """Bins of each rank, as many for each; their number is a multiple of ``ranks``. Largest first, back and forth."""
    order = sorted(bins, key=lambda members: (-sum(lengths[i] for i in members), members))
    rounds = [order[i : i + ranks] for i in range(0, len(order), ranks)]
    return [[row[rank if k % 2 == 0 else ranks - 1 - rank] for k, row in enumerate(rounds)] for rank in range(ranks)]


def plan(
    lengths: Sequence[int], *, ranks: int, max_tokens: int | None, micro_batch_size: int, padded: bool
) -> list[list[Bin]]:
    """Micro-batches of each rank: within ``max_tokens`` where it is set, else of ``micro_batch_size`` samples.

    Needs at least one sample per rank, and a number of samples that is a multiple of ``ranks``.
    """
    if max_tokens is None:
        bins = fixed_size(lengths, micro_batch_size)
    else:
        bins = first_fit_decreasing(lengths, max_tokens, padded=padded)
    return deal(split_largest(bins, lengths, -(-len(bins) // ranks) * ranks), lengths, ranks)
