"""Lengths of responses have the distribution that they are said to have."""

import math
import random
from statistics import fmean, pstdev

import pytest

from miles.sim.workloads import LogNormalLengths


def drawn(lengths, prompts=2000, group=8):
    rng = random.Random(1)
    return [[lengths({"rid": f"{p * group + i}.0"}, rng) for i in range(group)] for p in range(prompts)]


def test_logarithms_spread_within_and_between_prompts_as_given():
    logs = [[math.log(n) for n in row] for row in drawn(LogNormalLengths(10_000, 0.7, 0.9, 10**9, 8))]
    means = [fmean(row) for row in logs]
    assert fmean(means) == pytest.approx(math.log(10_000), abs=0.07)
    assert fmean(pstdev(row) ** 2 * 8 / 7 for row in logs) == pytest.approx(0.7**2, rel=0.05)
    assert pstdev(means) ** 2 == pytest.approx(0.9**2 + 0.7**2 / 8, rel=0.1)


def test_no_response_is_empty_or_longer_than_the_cap():
    lengths = [n for row in drawn(LogNormalLengths(4, 1.5, 1.5, 64, 8), 500) for n in row]
    assert (min(lengths), max(lengths)) == (1, 64)


def test_prompts_are_as_hard_as_their_seed_says():
    assert drawn(LogNormalLengths(99, 0.1, 1.0, 999, 8, seed=1), 9) == drawn(
        LogNormalLengths(99, 0.1, 1.0, 999, 8, 1), 9
    )
    assert drawn(LogNormalLengths(99, 0.1, 1.0, 999, 8, seed=1), 9) != drawn(
        LogNormalLengths(99, 0.1, 1.0, 999, 8, 2), 9
    )
