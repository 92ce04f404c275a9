"""Micro-batches stay within their limit, are never empty, and are as many on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.train.packing import deal, first_fit_decreasing, fixed_size, plan, split_largest

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def test_eight_samples_that_only_fit_alone_make_eight_bins():
    bins = first_fit_decreasing([7] * 8, 8)
    assert sorted(bins) == [[i] for i in range(8)]


def test_sample_above_the_limit_is_alone_in_its_bin():
    bins = first_fit_decreasing([4200, 90, 80, 100], 4096)
    assert [0] in bins
    assert all(sum([4200, 90, 80, 100][i] for i in b) <= 4096 for b in bins if b != [0])


def test_rank_with_short_samples_gets_as_many_bins_as_the_one_with_long_samples():
    assert split_largest([[0, 1, 2]], [2, 2, 2], 3) == [[0], [1], [2]]
    shares = plan([8, 8, 8, 2, 2, 2], ranks=2, max_tokens=8, micro_batch_size=1, padded=False)
    assert [len(bins) for bins in shares] == [2, 2]
    assert all(members for bins in shares for members in bins)


def test_too_few_samples_for_the_bins_wanted_are_refused():
    with pytest.raises(ValueError, match="2 samples can't fill 3 bins"):
        split_largest([[0, 1]], [1, 1], 3)


def test_fixed_bins_hold_samples_of_like_length():
    assert fixed_size([1, 9, 2, 8, 3], 2) == [[1, 3], [4, 2], [0]]


def test_largest_bins_are_dealt_back_and_forth():
    assert deal([[0], [1], [2], [3]], [40, 30, 20, 10], 2) == [[[0], [3]], [[1], [2]]]


@given(lengths_lists, st.integers(1, 60), st.booleans())
def test_bins_hold_every_sample_once_within_the_limit(lengths, limit, padded):
    bins = first_fit_decreasing(lengths, limit, padded=padded)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for members in bins:
        room = len(members) * max(lengths[i] for i in members) if padded else sum(lengths[i] for i in members)
        assert room <= limit or len(members) == 1


@given(lengths_lists, st.integers(1, 60))
def test_padding_stays_the_smaller_part_of_a_bin(lengths, limit):
    for members in first_fit_decreasing(lengths, limit, padded=True):
        assert 2 * sum(lengths[i] for i in members) >= len(members) * max(lengths[i] for i in members)


@given(lengths_lists, st.one_of(st.none(), st.integers(1, 60)), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_rank_gets_as_many_non_empty_bins(lengths, max_tokens, size, ranks, padded):
    lengths = lengths * ranks
    shares = plan(lengths, ranks=ranks, max_tokens=max_tokens, micro_batch_size=size, padded=padded)
    assert len({len(bins) for bins in shares}) == 1
    assert all(members for bins in shares for members in bins)
    assert sorted(i for bins in shares for members in bins for i in members) == list(range(len(lengths)))
