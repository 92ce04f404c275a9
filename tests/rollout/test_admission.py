"""Admission and staleness as tables: counts and versions in, verdicts out."""

import pytest

from miles.rollout.admission import Bounds, Load, may_retry, may_start
from miles.rollout.staleness import Versions, age, finished_group, is_stale
from miles.types import FinishedGroup, Sample, VersionSpan

ROOMY = Load(running_samples=0, outstanding=0, untaken=0, buffered=0, steps_due=1)


def bounds(**changes):
    values = dict(slots=32, group_size=4, batch_groups=8, buffer_groups=16, staleness=2, interval=1, ahead_groups=None)
    return Bounds(**(values | changes))


def load(**changes):
    return Load(**(vars(ROOMY) | changes))


def test_a_group_needs_all_its_slots():
    assert may_start(bounds(), load(running_samples=28)) == "start"
    assert may_start(bounds(), load(running_samples=29)) == "slots"


@pytest.mark.parametrize(
    ("staleness", "interval", "steps_due", "credit"),
    [(0, 1, 1, 8), (0, 1, 0, 0), (2, 1, 1, 24), (2, 1, 0, 16), (1, 3, 3, 48), (1, 3, 0, 24), (4, 1, 1, 40)],
)
def test_version_credit_is_b_times_k_i_plus_r(staleness, interval, steps_due, credit):
    given = bounds(staleness=staleness, interval=interval)
    if credit:
        assert may_start(given, load(outstanding=credit - 1, steps_due=steps_due)) == "start"
    assert may_start(given, load(outstanding=credit, steps_due=steps_due)) == "credit"


def test_without_a_bound_there_is_no_credit_to_run_out_of():
    assert may_start(bounds(staleness=None), load(outstanding=10_000)) == "start"


def test_full_buffer_stops_new_starts():
    assert may_start(bounds(), load(buffered=15)) == "start"
    assert may_start(bounds(), load(buffered=16)) == "buffer"


def test_one_step_off_starts_no_more_than_a_batch_ahead():
    assert may_start(bounds(ahead_groups=8), load(untaken=7)) == "start"
    assert may_start(bounds(ahead_groups=8), load(untaken=8)) == "ahead"


def test_a_retry_is_asked_for_slots_only():
    full = load(outstanding=1000, buffered=1000, steps_due=0)
    assert may_start(bounds(), full) == "credit"
    assert may_retry(bounds(), full) == "start"
    assert may_retry(bounds(), load(running_samples=30)) == "slots"


def test_credit_after_resume_counts_versions_not_from_zero():
    """S1: bound 2, batch 8, resumed at version 100 with nothing open: 24 groups may be outstanding, not 824."""
    versions = Versions()
    versions.raise_to(100, steps_due=1)
    started = 0
    while (
        may_start(bounds(slots=10**6, buffer_groups=10**6), load(outstanding=started, steps_due=versions.steps_due))
        == "start"
    ):
        started += 1
    assert started == 24


def test_raising_the_version_resets_the_steps_due():
    versions = Versions()
    versions.raise_to(1, steps_due=3)
    for left in (2, 1, 0, 0):
        versions.end_step()
        assert versions.steps_due == left
    versions.raise_to(2, steps_due=3)
    assert (versions.current, versions.steps_due) == (2, 3)


def test_age_counts_queue_time():
    """S4: finished at version 1, trained at 9, bound 4: too old, though it was fresh when it finished."""
    group = FinishedGroup(0, [], oldest_version=1, newest_version=1)
    assert age(group, 9) == 8
    assert is_stale(group, 9, 4)
    assert not is_stale(group, 5, 4)


@pytest.mark.parametrize("bound", [None, 0, 100])
def test_a_group_of_unknown_version_is_never_fresh(bound):
    """S7: neither a label nor a submit version."""
    assert is_stale(finished_group(0, [Sample(tokens=[1])]), 1, bound)


def test_the_oldest_token_gives_a_group_its_age():
    samples = [
        Sample(version_spans=[VersionSpan(3, 0, 2), VersionSpan(5, 2, 4)], submit_version=3),
        Sample(version_spans=[VersionSpan(None, 0, 2)], submit_version=2),
    ]
    group = finished_group(0, samples)
    assert (group.oldest_version, group.newest_version) == (2, 5)
