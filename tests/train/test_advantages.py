"""Advantages are relative to a group's own mean, by group id."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.owners import TrainSettings
from miles.train.advantages import estimate, grpo_advantages, plain_advantages, token_advantages, whiten


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


# ---- advantages of tokens


def estimated(rewards, groups, **train):
    return estimate(rewards, groups, TrainSettings(**train)).tolist()


def test_estimators_differ_in_baseline_and_scale():
    rewards, groups = [1.0, 3.0, 5.0, None], [0, 0, 1, 1]
    assert estimated(rewards, groups) == estimated(rewards, groups, advantage_estimator="gspo")
    assert estimated(rewards, groups) == pytest.approx([-0.7071, 0.7071, 0.0, 0.0], abs=1e-4)
    assert estimated(rewards, groups, advantage_estimator="reinforce_plus_plus") == [1.0, 3.0, 5.0, 0.0]
    assert estimated(rewards, groups, advantage_estimator="reinforce_plus_plus_baseline") == [-1.0, 1.0, 0.0, 0.0]


def test_returns_are_the_discounted_penalties_that_follow_and_the_reward_of_the_last_token():
    kl = np.array([0.5, -0.25, 1.0])
    train = TrainSettings(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, gamma=0.9)
    expected = [sum(0.9 ** (s - t) * (-0.1 * kl[s] + (2.0 if s == 2 else 0.0)) for s in range(t, 3)) for t in range(3)]
    np.testing.assert_allclose(token_advantages(2.0, kl, train), expected, rtol=1e-12)
    assert token_advantages(2.0, np.zeros(0), train).tolist() == []


def test_baseline_variant_pays_for_each_token_itself():
    train = TrainSettings(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1, gamma=0.5)
    np.testing.assert_allclose(token_advantages(2.0, np.array([0.5, -1.0]), train), [1.95, 2.1])


def test_grpo_has_no_penalty():
    assert token_advantages(2.0, np.array([0.5]), TrainSettings(kl_coef=0.1)).tolist() == [2.0]


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_whitening_is_that_of_all_tokens_whoever_holds_them(cut):
    """Two ranks, cut anywhere, one of them perhaps without a sample, against numpy over everything."""
    samples = [np.array([1.0]), np.array([2.0, 7.0]), np.zeros(0), np.array([-3.0, 0.5, 0.5])]
    everything = np.concatenate(samples)
    expected = (everything - everything.mean()) / everything.std()
    ranks = [samples[:cut], samples[cut:]]
    moments = [np.array([sum(s.sum() for s in rank), sum(len(s) for s in rank)]) for rank in ranks]
    mean = sum(m[0] for m in moments) / sum(m[1] for m in moments)
    squares = [np.array([sum(((s - mean) ** 2).sum() for s in rank)]) for rank in ranks]
    found = []
    for rank in ranks:
        totals = iter([sum(moments), sum(squares)])
        found += whiten(rank, lambda own, totals=totals: next(totals))
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)


def test_equal_advantages_whiten_to_0():
    assert whiten([np.full(3, 2.0)], lambda own: own)[0].tolist() == [0.0] * 3
