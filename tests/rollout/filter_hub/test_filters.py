"""Laws of the stock filters, and of what a user's filter may answer."""

from argparse import Namespace

import numpy as np
import pytest

from miles.errors import HookError
from miles.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted, check_reward_nonzero_std
from miles.types import Sample

ARGS = Namespace(reward_key=None)


def group(*rewards, **values):
    return [Sample(index=i, reward=r, **values) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(("rewards", "keep", "reason"), [
    ([0.0, 1.0], True, None),
    ([1.0, 1.0], False, "zero_std_1"),
    ([0.1, 0.1, 0.1], False, "zero_std_0.1"),
    ([1.0], False, "zero_std_1"),
    ([1.0, None], False, "zero_std_1"),
    ([1.0, None, 0.0], True, None),
    ([None, None], False, "unscored"),
])  # fmt: skip
def test_group_without_spread_is_rejected(rewards, keep, reason):
    assert check_reward_nonzero_std(ARGS, group(*rewards)) == DynamicFilterOutput(keep, reason)


def test_spread_is_that_of_the_trained_reward():
    rewards = group({"score": 1.0, "length": 3}, {"score": 1.0, "length": 4})
    assert not check_reward_nonzero_std(Namespace(reward_key="score"), rewards).keep
    assert check_reward_nonzero_std(Namespace(reward_key="length"), rewards).keep


def test_compact_siblings_count():
    assert check_reward_nonzero_std(ARGS, [group(1.0), group(1.0, 0.0)]).keep


def test_aborted_sample_rejects_its_group():
    fine = group(1.0, 0.0, status=Sample.Status.TRUNCATED)
    assert check_no_aborted(ARGS, fine) == DynamicFilterOutput(True)
    aborted = group(1.0, status=Sample.Status.ABORTED)
    assert check_no_aborted(ARGS, [*fine, aborted]) == DynamicFilterOutput(False, "aborted")


@pytest.mark.parametrize("answer", [True, False, np.bool_(True), np.bool_(False)])
def test_plain_bools_are_answers(answer):
    assert call_dynamic_filter(lambda args, group: answer, ARGS, group(1.0)) == DynamicFilterOutput(bool(answer))


def test_reasons_come_through():
    output = DynamicFilterOutput(False, "too_easy")
    assert call_dynamic_filter(lambda args, group: output, ARGS, group(1.0)) is output


@pytest.mark.parametrize("answer", [None, "keep", 1, []])
def test_other_answers_are_refused(answer):
    with pytest.raises(HookError, match="a bool or a DynamicFilterOutput works"):
        call_dynamic_filter(lambda args, group: answer, ARGS, group(1.0))


def test_failing_filter_is_named_with_sample_and_line():
    def picky_filter(args, group):
        return group[0].reward["score"] > 0

    with pytest.raises(
        HookError, match=r"picky_filter failed on the group of sample 0: TypeError.*test_filters.py:\d+"
    ):
        call_dynamic_filter(picky_filter, ARGS, group(1.0))
