"""Where every prompt is: issued, finished, taken by a step, then trained or given up with a reason.

    issue ──▶ finish ──▶ take(step) ──▶ commit(step): trained
      ▲          │
      └─ reissue ┘        any of these ──▶ give_up(reason)

The only record of prompts: counters, admission, metrics and checkpoints are read from it, never kept beside it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from miles.types import Group, Sample, iter_samples

Place = Literal["issued", "finished", "taken"]


@dataclass(eq=False)
class OpenGroup:
    """A prompt that was issued and is neither trained nor given up.

    ``version`` was current when it was last issued. ``prompts`` are its samples as they are issued, ``results`` what
    generation made of them (siblings may be lists, lost ones missing); ``attempts`` counts how often each sample was
    started, ``masked`` its tokens that the step which has it must not train.
    """

    issue_id: int
    prompts: list[Sample]
    version: int = 0
    results: Group = field(default_factory=list)
    place: Place = "issued"
    attempts: list[int] = field(default_factory=list)
    masked: int = 0

    def __post_init__(self) -> None:
        self.attempts = [0] * len(self.prompts)

    @property
    def tokens(self) -> int:
        """Response tokens that were sampled for it."""
        return tokens_of(self.results or self.prompts)


@dataclass(frozen=True)
class LedgerCounts:
    """A snapshot. Groups but for ``wasted_tokens``, response tokens that were sampled and will not be trained, and
    ``masked_tokens``, those of trained groups that a staleness policy kept out of the loss.

    ``length_bias``: mean response length of trained groups over that of finished ones; ``masked_length_bias`` leaves
    masked tokens out of the trained ones.
    """

    issued: int
    outstanding: int
    trained: int
    given_up: dict[str, int]
    wasted_tokens: int
    masked_tokens: int
    length_bias: float | None
    masked_length_bias: float | None


@dataclass
class Ledger:
    """``window`` groups are looked back on for the length bias."""

    window: int
    _next_id: int = 0
    _open: dict[int, OpenGroup] = field(default_factory=dict)
    _untaken: int = 0
    _taken: int = 0
    _trained: int = 0
    _given_up: Counter[str] = field(default_factory=Counter)
    _wasted_tokens: int = 0
    _masked_tokens: int = 0
    _running: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._finished_lengths: deque[float] = deque(maxlen=self.window)
        self._trained_lengths: deque[tuple[float, float]] = deque(maxlen=self.window)

    def issue(self, prompts: list[Sample], version: int = 0) -> OpenGroup:
        group = OpenGroup(self._next_id, prompts, version)
        self._next_id += 1
        self._open[group.issue_id] = group
        self._untaken += 1
        self._running[version] += 1
        return group

    def finish(self, group: OpenGroup, results: Group) -> None:
        """The group has all its rewards and waits to be trained."""
        self._stop_running(group)
        group.place, group.results = "finished", results
        self._finished_lengths.append(group.tokens / max(1, len(results)))

    def reissue(self, issue_id: int, version: int) -> OpenGroup:
        """The group is sampled again from its prompt, at ``version``; what it had is wasted."""
        group = self._open[issue_id]
        self._wasted_tokens += group.tokens
        self._stop_running(group)
        group.place, group.results, group.version = "issued", [], version
        self._running[version] += 1
        for sample in group.prompts:
            sample.reset_for_retry()
        return group

    def has_attempts_left(self, issue_id: int, budget: int) -> bool:
        """Whether every sample of the group may be started once more: ``budget`` attempts after the first."""
        return all(n <= budget for n in self._open[issue_id].attempts)

    def waste(self, tokens: int) -> None:
        """Response tokens of an attempt that failed."""
        self._wasted_tokens += tokens

    def take(self, issue_ids: Iterable[int]) -> None:
        """A training step has the groups now."""
        for issue_id in issue_ids:
            self._open[issue_id].place = "taken"
            self._untaken -= 1
            self._taken += 1

    def mask(self, issue_id: int, tokens: int) -> None:
        """The step that has the group must not train so many of its response tokens: they are too old."""
        self._open[issue_id].masked = tokens
        self._masked_tokens += tokens

    def commit(self) -> int:
        """The optimizer step that took groups has ended: they are trained. Returns how many."""
        trained = [g for g in self._open.values() if g.place == "taken"]
        for group in trained:
            samples = max(1, len(group.results))
            self._trained_lengths.append((group.tokens / samples, (group.tokens - group.masked) / samples))
            del self._open[group.issue_id]
        self._trained += len(trained)
        return len(trained)

    def give_up(self, issue_id: int, reason: str) -> None:
        """The prompt will not be trained; its tokens are wasted."""
        group = self._open.pop(issue_id)
        self._stop_running(group)
        self._untaken -= group.place != "taken"
        self._given_up[reason] += 1
        self._wasted_tokens += group.tokens

    def _stop_running(self, group: OpenGroup) -> None:
        if group.place == "issued":
            self._running[group.version] -= 1
            if not self._running[group.version]:
                del self._running[group.version]

    @property
    def running(self) -> Mapping[int, int]:
        """Groups that are issued and not finished, by the version that they were last issued at."""
        return self._running

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def untaken(self) -> int:
        return self._untaken

    @property
    def taken(self) -> int:
        """Groups that were ever handed to the trainer."""
        return self._taken

    def open_prompts(self) -> list[list[Sample]]:
        """The samples of every open group, in issue order: what a resumed run has to issue again."""
        return [g.prompts for _, g in sorted(self._open.items())]

    def place_of(self, issue_id: int) -> Place | None:
        group = self._open.get(issue_id)
        return group.place if group else None

    def counts(self) -> LedgerCounts:
        bias: list[float | None] = [None, None]
        if self._trained_lengths and any(self._finished_lengths):
            finished = fmean(self._finished_lengths)
            bias = [fmean(lengths) / finished for lengths in zip(*self._trained_lengths, strict=True)]
        return LedgerCounts(
            issued=self._next_id,
            outstanding=self.outstanding,
            trained=self._trained,
            given_up=dict(self._given_up),
            wasted_tokens=self._wasted_tokens,
            masked_tokens=self._masked_tokens,
            length_bias=bias[0],
            masked_length_bias=bias[1],
        )


def tokens_of(samples: Group) -> int:
    """Response tokens of a group."""
    return sum(s.response_length for s in iter_samples(samples))
