"""Finished groups and a version in, verdicts out: what happens to a group that would pass the staleness bound. Pure.

    policy   a group that got too old          a step may take its batch                   trained
    evict    leaves for the unused handler     as soon as it is full                       whole groups
    wait     (none does)                       once what it leaves behind can be on time   whole groups
    mask     leaves if nothing is left of it   as soon as it is full                       tokens within the bound

All of them: no trained token is older than the bound K at the version that is current when its step starts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from miles.rollout.admission import Bounds
from miles.rollout.staleness import Versions, is_stale
from miles.types import FinishedGroup, Sample


class StalenessPolicy(Protocol):
    """Asked on the rollout loop, each time something changed: cheap, and without side effects."""

    def evicts(self, group: FinishedGroup, version: int) -> bool:
        """Must the group leave the buffer before a step at ``version``?"""

    def may_take(self, running: Mapping[int, int], finished: Mapping[int, int], versions: Versions) -> bool:
        """May a step take the oldest batch of ``finished`` now? Both are groups per version that they count from."""

    def trained(self, group: FinishedGroup, version: int) -> FinishedGroup:
        """The group as a step at ``version`` trains it."""


@dataclass(frozen=True)
class Evict:
    """Late groups are dropped or sampled again: wasted tokens, and a bias to short answers."""

    bounds: Bounds

    def evicts(self, group: FinishedGroup, version: int) -> bool:
        return is_stale(group, version, self.bounds.staleness)

    def may_take(self, running: Mapping[int, int], finished: Mapping[int, int], versions: Versions) -> bool:
        return True

    def trained(self, group: FinishedGroup, version: int) -> FinishedGroup:
        return group


@dataclass(frozen=True)
class Wait(Evict):
    """Steps wait for old groups, so that none gets too old; `admission.may_start` makes this always satisfiable.

    A group of version u is due by the last step that starts at u + K. A step takes its batch only if, for each such
    version, the groups due by it that are left behind fit into the steps left up to it.
    """

    def may_take(self, running: Mapping[int, int], finished: Mapping[int, int], versions: Versions) -> bool:
        bounds, behind, done = self.bounds, 0, 0
        if bounds.staleness is None:
            return True
        for oldest in sorted({*running, *finished}):
            versions_left = oldest + bounds.staleness - versions.current
            if versions_left < 0:  # too late already: it will be evicted, waiting can't save it
                continue
            behind += running.get(oldest, 0)
            done += finished.get(oldest, 0)
            steps_left = max(0, versions.steps_due - 1) + versions_left * bounds.interval
            if behind + max(0, done - bounds.batch_groups) > bounds.batch_groups * steps_left:
                return False
        return True


@dataclass(frozen=True)
class Mask(Evict):
    """Tokens older than the bound get loss mask 0; the group keeps its rewards, so its baseline has no bias."""

    def evicts(self, group: FinishedGroup, version: int) -> bool:
        bound = self.bounds.staleness
        if bound is None or group.newest_trainable is None:
            return is_stale(group, version, bound)
        return version - group.newest_trainable > bound

    def trained(self, group: FinishedGroup, version: int) -> FinishedGroup:
        bound = self.bounds.staleness
        if bound is None or not is_stale(group, version, bound):
            return group
        return replace(group, samples=[_masked(item, version - bound) for item in group.samples])


def _masked(item: Sample | list[Sample], oldest: int) -> Sample | list[Sample]:
    """A copy whose loss mask is 0 on tokens sampled before version ``oldest``, or by nobody knows which."""
    if isinstance(item, list):
        return [masked for sample in item if isinstance(masked := _masked(sample, oldest), Sample)]
    masked = copy.copy(item)
    masked.loss_mask = [0] * item.response_length
    for version, start, end in item.sampled_spans():
        if version is not None and version >= oldest:
            mask = item.loss_mask
            masked.loss_mask[start:end] = [1] * (end - start) if mask is None else mask[start:end]
    return masked


POLICIES: Mapping[str, type[Evict]] = {"evict": Evict, "wait": Wait, "mask": Mask}
