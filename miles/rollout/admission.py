"""Counts in, a verdict out: may another group start, and if not, what holds it back? Pure.

Three rules, all of which must hold; a retry keeps its prompt's credit, so it is asked the first one only.

    slots    running samples + n <= slots
    credit   outstanding groups < B * (K * I + r), where K bounds staleness
    buffer   groups past generation, scored or not, < capacity

Two more where they apply: `ahead`, for one-step-off training, keeps groups issued and not yet handed to the trainer below
one batch; `end` starts nothing that no step is left to take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["start", "slots", "credit", "buffer", "ahead", "end"]


@dataclass(frozen=True)
class Bounds:
    """The sizes that admission keeps to: ``slots`` in samples, everything else in groups or versions."""

    slots: int
    group_size: int
    batch_groups: int
    buffer_groups: int
    staleness: int | None
    interval: int
    ahead_groups: int | None = None
    total_groups: int | None = None


@dataclass(frozen=True)
class Load:
    """What there is now: ``outstanding`` groups are issued and neither trained nor given up, ``untaken`` of them have not
    been handed to the trainer, ``buffered`` of those are past generation; ``taken`` counts all that ever were handed over.
    ``steps_due``: see `Versions`."""

    running_samples: int
    outstanding: int
    untaken: int
    buffered: int
    steps_due: int
    taken: int = 0


def may_retry(bounds: Bounds, load: Load) -> Verdict:
    """May a group start again that was issued before?"""
    return "start" if load.running_samples + bounds.group_size <= bounds.slots else "slots"


def may_start(bounds: Bounds, load: Load) -> Verdict:
    """May a new prompt start? The first rule that says no names what is waited for."""
    if bounds.staleness is not None:
        credit = bounds.batch_groups * (bounds.staleness * bounds.interval + load.steps_due)
        if load.outstanding >= credit:
            return "credit"
    if bounds.total_groups is not None and load.untaken >= bounds.total_groups - load.taken:
        return "end"
    if bounds.ahead_groups is not None and load.untaken >= bounds.ahead_groups:
        return "ahead"
    if load.buffered >= bounds.buffer_groups:
        return "buffer"
    return may_retry(bounds, load)
