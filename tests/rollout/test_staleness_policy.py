"""Policies as tables: versions of groups in, verdicts and masks out."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.admission import Bounds
from miles.rollout.conversion import to_train_data
from miles.rollout.staleness import Versions, finished_group
from miles.rollout.staleness_policy import POLICIES, Mask, Wait
from miles.types import Sample, VersionSpan, iter_samples


def bounds(staleness, batch_groups=2, interval=1):
    return Bounds(
        slots=99, group_size=1, batch_groups=batch_groups, buffer_groups=99, staleness=staleness, interval=interval
    )


def at(version, steps_due=1):
    versions = Versions()
    versions.raise_to(version, steps_due)
    return versions


def sampled(*pieces, **fields):
    """A sample whose response is made of (version, tokens) pieces."""
    sample = Sample(tokens=[7], reward=1.0, index=0, **fields)
    for version, tokens in pieces:
        sample.append_response([1] * tokens, [-0.5] * tokens, [VersionSpan(version, 0, tokens)])
    return sample


def group(*samples):
    return finished_group(0, list(samples))


# ---- what is evicted


@pytest.mark.parametrize(
    ("policy", "pieces", "version", "evicted"),
    [
        ("evict", [(3, 4), (5, 4)], 5, False),
        ("evict", [(3, 4), (5, 4)], 6, True),
        ("wait", [(3, 4), (5, 4)], 6, True),
        ("mask", [(3, 4), (5, 4)], 6, False),
        ("mask", [(3, 4), (5, 4)], 7, False),
        ("mask", [(3, 4), (5, 4)], 8, True),
    ],
)
def test_a_group_leaves_when_its_policy_has_nothing_to_train(policy, pieces, version, evicted):
    assert POLICIES[policy](bounds(2)).evicts(group(sampled(*pieces)), version) is evicted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bound", [None, 0, 9])
def test_what_has_no_version_is_never_fresh(policy, bound):
    """S7: neither a label nor a submit version."""
    assert POLICIES[policy](bounds(bound)).evicts(group(Sample(tokens=[1, 2], response_length=1)), 1)


def test_fresh_tokens_that_a_hook_keeps_out_of_the_loss_are_nothing_left():
    sample = sampled((1, 2), (5, 2))
    sample.loss_mask = [1, 1, 0, 0]
    assert Mask(bounds(1)).evicts(group(sample), 5)


# ---- what is masked


def test_tokens_older_than_the_bound_are_masked_and_the_rest_is_as_it_was():
    sample = sampled((1, 2), (2, 2), (4, 1))
    sample.append_response([9], [0.0], [], trainable=False)
    sample.append_response([1, 1], [-0.5, -0.5], [VersionSpan(4, 0, 2)])
    given = group(sample, sampled((1, 3)))
    trained = Mask(bounds(2)).trained(given, 4)
    assert [s.loss_mask for s in trained.samples] == [[0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0]]
    assert sample.loss_mask == [1, 1, 1, 1, 1, 0, 1, 1]
    columns = to_train_data([trained], None)
    assert [m.tolist() for m in columns["loss_masks"]] == [s.loss_mask for s in trained.samples]
    assert columns["raw_reward"] == [1.0, 1.0]
    assert columns["group_ids"] == [0, 0]


def test_nothing_is_copied_where_nothing_is_too_old():
    given = group(sampled((3, 4)))
    assert Mask(bounds(2)).trained(given, 5) is given
    assert Mask(bounds(None)).trained(given, 500) is given


def test_compact_siblings_are_masked_like_samples():
    given = group([sampled((1, 2)), sampled((5, 2))], sampled((1, 1), (5, 1)))
    trained = Mask(bounds(1)).trained(given, 5)
    assert [s.loss_mask for s in iter_samples(trained.samples)] == [[0, 0], [1, 1], [0, 1]]


PIECES = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(1, 6)), st.lists(st.integers(0, 1), max_size=4)), max_size=4
)


@given(PIECES, st.integers(0, 4), st.one_of(st.none(), st.integers(1, 6)))
def test_masks_are_those_of_asking_token_by_token(pieces, bound, submitted):
    sample = sampled(*((version, len(bits)) for version, bits in pieces), submit_version=submitted)
    sample.loss_mask = [bit for _, bits in pieces for bit in bits]
    ages = [(submitted if version is None else version, bit) for version, bits in pieces for bit in bits]
    (masked,) = Mask(bounds(bound)).trained(group(sample), 6).samples
    assert masked.loss_mask == [bit if v is not None and 6 - v <= bound else 0 for v, bit in ages]


# ---- the look-ahead of wait


@pytest.mark.parametrize(
    ("running", "finished", "steps_due", "may"),
    [
        ({}, {5: 2}, 1, True),
        ({3: 1}, {5: 2}, 1, False),  # due now, and would be left behind
        ({4: 2}, {5: 2}, 1, True),  # the two due by version 6 fill the step there
        ({4: 3}, {5: 2}, 1, False),
        ({4: 2}, {3: 1, 4: 2}, 1, False),  # the oldest two go, one of version 4 stays: three for one step
        ({4: 2, 5: 3}, {5: 2}, 1, False),  # fits by version 6, but five are too many by version 7
        ({3: 2}, {5: 2}, 2, True),  # another step of this version is left
        ({1: 4}, {5: 2}, 1, True),  # too late already: waiting can't save it
    ],
)
def test_a_step_waits_for_groups_that_would_not_be_on_time(running, finished, steps_due, may):
    assert Wait(bounds(2)).may_take(running, finished, at(5, steps_due)) is may


GROUPS = st.dictionaries(st.integers(3, 6), st.integers(0, 6))


@given(GROUPS, GROUPS, st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_the_look_ahead_is_that_of_the_definition(running, finished, bound, batch, interval, steps_due):
    """For each due version d: what is left behind and due by d fits into the steps after this one, up to d."""
    version = 6
    running = {v: n for v, n in running.items() if v + bound >= version}
    finished = {v: n for v, n in finished.items() if v + bound >= version}
    waiting = sorted(v for v, n in finished.items() for _ in range(n))
    behind = waiting[batch:] + [v for v, n in running.items() for _ in range(n)]
    fits = all(
        sum(v + bound <= due for v in behind) <= batch * (steps_due - 1 + (due - version) * interval)
        for due in range(version, version + bound + 1)
    )
    policy = Wait(bounds(bound, batch, interval))
    assert policy.may_take(running, finished, at(version, steps_due)) is fits


def test_without_a_bound_nobody_waits():
    for policy, running in product(POLICIES.values(), ({}, {1: 99})):
        assert policy(bounds(None)).may_take(running, {9: 2}, at(9))
