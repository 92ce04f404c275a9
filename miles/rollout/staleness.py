"""Versions in, ages and verdicts out. Pure, but for the one line that raises the version."""

from __future__ import annotations

from miles.types import FinishedGroup, Group, iter_samples


class Versions:
    """The current weight version, and how many training steps it has left.

    ``steps_due`` is the r of the version credit (`admission.may_start`): the training steps of the current version that
    have not ended yet.
    """

    def __init__(self) -> None:
        self.current = 0
        self.steps_due = 0

    def raise_to(self, version: int, steps_due: int) -> None:
        """The engines have ``version`` now, for ``steps_due`` training steps: the only place where the version rises."""
        self.current, self.steps_due = version, steps_due

    def end_step(self) -> None:
        """A training step of the current version was committed."""
        self.steps_due = max(0, self.steps_due - 1)


def age(group: FinishedGroup, version: int) -> int | None:
    """Age of a group at a step that starts at ``version``: that of its oldest token, queue time included."""
    return None if group.oldest_version is None else version - group.oldest_version


def is_stale(group: FinishedGroup, version: int, bound: int | None) -> bool:
    """Whether a step at ``version`` must not train the group. What has no version at all is never fresh."""
    group_age = age(group, version)
    return group_age is None or (bound is not None and group_age > bound)


def finished_group(issue_id: int, samples: Group) -> FinishedGroup:
    """A scored group with the range of its versions; one sample of unknown version makes the oldest unknown."""
    oldest = [s.oldest_version for s in iter_samples(samples)]
    known = [v for v in oldest if v is not None]
    newest = [s.newest_version for s in iter_samples(samples) if s.newest_version is not None]
    trainable = {v for s in iter_samples(samples) for v in s.trainable_tokens() if v is not None}
    return FinishedGroup(
        issue_id,
        samples,
        oldest_version=min(known) if known and len(known) == len(oldest) else None,
        newest_version=max(newest, default=None),
        newest_trainable=max(trainable, default=None),
    )
