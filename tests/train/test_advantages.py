"""Advantages are relative to a group's own mean, by group id."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.train.advantages import grpo_advantages, plain_advantages


def reference(rewards, group_ids, std_normalization):
    values = []
    for reward, group in zip(rewards, group_ids, strict=True):
        members = np.array([r for r, g in zip(rewards, group_ids, strict=True) if g == group and r is not None], float)
        if reward is None:
            values.append(0.0)
            continue
        scale = 1.0
        if std_normalization and len(members) > 1 and members.std(ddof=1) > 0:
            scale = members.std(ddof=1) + 1e-6
        values.append((reward - members.mean()) / scale)
    return np.array(values)


def test_uneven_groups_have_baselines_of_their_own():
    advantages = grpo_advantages([1.0, 3.0, 5.0], [0, 0, 1], std_normalization=True)
    np.testing.assert_allclose(advantages, [-0.7071, 0.7071, 0.0], atol=1e-4)


def test_group_of_one_has_advantage_zero():
    assert grpo_advantages([1.0], [9], std_normalization=True).tolist() == [0.0]


def test_unscored_sample_is_outside_the_baseline_and_has_advantage_zero():
    assert grpo_advantages([1.0, None, 1.0, 1.0], [4] * 4, std_normalization=True).tolist() == [0.0] * 4
    np.testing.assert_allclose(grpo_advantages([1.0, None, 3.0], [4] * 3, std_normalization=False), [-1.0, 0.0, 1.0])


def test_group_without_any_score_has_advantage_zero():
    assert grpo_advantages([None, None], [0, 0], std_normalization=True).tolist() == [0.0, 0.0]


def test_plain_rewards_are_advantages_as_they_are():
    assert plain_advantages([1.0, None, -2.0]).tolist() == [1.0, 0.0, -2.0]


@pytest.mark.parametrize("std_normalization", [True, False])
@given(data=st.lists(st.tuples(st.one_of(st.none(), st.integers(-3, 3)), st.integers(0, 4)), min_size=1, max_size=24))
def test_advantages_equal_the_reference_in_any_order_of_samples(std_normalization, data):
    rewards = [None if r is None else r / 2 for r, _ in data]
    groups = [g * 1000 for _, g in data]
    found = grpo_advantages(rewards, groups, std_normalization=std_normalization)
    np.testing.assert_allclose(found, reference(rewards, groups, std_normalization), atol=1e-9)
