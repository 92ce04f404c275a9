"""Where every prompt is: issued, finished, taken by a step, then trained or given up with a reason.

    issue ──▶ finish ──▶ take(step) ──▶ commit(step): trained
      ▲          │
      └─ reissue ┘        any of these ──▶ give_up(reason)

The only record of prompts: counters, admission, metrics and checkpoints are read from it, never kept beside it. Every
transition is told to a `LedgerStore`, which keeps it beyond the process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from miles.rollout.ledger_store import LedgerStore, NoStore, Statement
from miles.rollout.payload import Payload
from miles.rollout.staleness import finished_group
from miles.types import Batch, FinishedGroup, Group, Sample, iter_samples

Place = Literal["issued", "finished", "taken"]


@dataclass(eq=False)
class OpenGroup:
    """A prompt that was issued and is neither trained nor given up.

    ``version`` was current when it was last issued. ``prompts`` are its samples as they are issued, ``results`` what
    generation made of them (siblings may be lists, lost ones missing); ``attempts`` counts how often each sample was
    started, ``wasted`` the response tokens of failed ones, ``masked`` those that the step which has it must not train.
    """

    issue_id: int
    prompts: list[Sample]
    version: int = 0
    results: Group = field(default_factory=list)
    place: Place = "issued"
    attempts: list[int] = field(default_factory=list)
    wasted: int = 0
    masked: int = 0

    def __post_init__(self) -> None:
        self.attempts = self.attempts or [0] * len(self.prompts)

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
    """``window`` groups are looked back on for the length bias; ``waiting`` are those that a resumed run issues again."""

    window: int
    store: LedgerStore = field(default_factory=NoStore)
    lineage: int = 0
    waiting: deque[OpenGroup] = field(default_factory=deque)
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

    def restore(self, next_id: int, finished: Iterable[OpenGroup], waiting: Iterable[OpenGroup]) -> None:
        """Goes on from what a store holds: ``finished`` groups are there, ``waiting`` ones start before new prompts."""
        self._next_id = next_id
        self._open = {group.issue_id: group for group in finished}
        self._untaken = len(self._open)
        self.waiting = deque(waiting)

    def issue(self, prompts: list[Sample], version: int = 0) -> OpenGroup:
        group = OpenGroup(self._next_id, prompts, version)
        self._next_id += 1
        self._start(group)
        prompt = prompts[0].group_index if prompts else None
        self.store.write((_ISSUE, (group.issue_id, prompt, self.lineage, _text(group.attempts), _text(group.attempts))))
        return group

    def issue_waiting(self, version: int) -> OpenGroup:
        """The first of ``waiting`` starts, at ``version``; it keeps its number."""
        group = self.waiting.popleft()
        group.version = version
        self._start(group)
        return group

    def _start(self, group: OpenGroup) -> None:
        self._open[group.issue_id] = group
        self._untaken += 1
        self._running[group.version] += 1

    def finish(self, group: OpenGroup, results: Group) -> None:
        """The group has all its rewards and waits to be trained."""
        self._stop_running(group)
        group.place, group.results = "finished", results
        self._finished_lengths.append(group.tokens / max(1, len(results)))
        oldest, newest = finished_group(group.issue_id, results).oldest_version, _newest_for_sure(results)
        row = (self.lineage, self.lineage, _text(group.attempts), oldest, newest, group.tokens, group.wasted)
        self.store.write((_FINISH, (*row, group.issue_id)), (_KEEP, (group.issue_id, Payload(results))))

    def reissue(self, issue_id: int, version: int) -> OpenGroup:
        """The group is sampled again from its prompt, at ``version``; what it had is wasted."""
        group = self._open[issue_id]
        self.waste(group.tokens, group)
        self._stop_running(group)
        group.place, group.results, group.version = "issued", [], version
        self._running[version] += 1
        for sample in group.prompts:
            sample.reset_for_retry()
        spent = _text(group.attempts)
        self.store.write((_REISSUE, (self.lineage, spent, spent, group.wasted, issue_id)), (_FORGET, (issue_id,)))
        return group

    def has_attempts_left(self, issue_id: int, budget: int) -> bool:
        """Whether every sample of the group may be started once more: ``budget`` attempts after the first."""
        return all(n <= budget for n in self._open[issue_id].attempts)

    def waste(self, tokens: int, group: OpenGroup) -> None:
        """Response tokens of an attempt of the group that failed."""
        self._wasted_tokens += tokens
        group.wasted += tokens

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

    def commit(self, batch: Batch | None = None) -> int:
        """The optimizer step that took groups has ended: they are trained. Returns how many.

        ``batch`` is what it trained, for the store; callers outside a ring have none.
        """
        trained = [g for g in self._open.values() if g.place == "taken"]
        for group in trained:
            samples = max(1, len(group.results))
            self._trained_lengths.append((group.tokens / samples, (group.tokens - group.masked) / samples))
            del self._open[group.issue_id]
        self._trained += len(trained)
        if batch is not None:
            self.store.write(*self._trained_rows(batch))
        return len(trained)

    def _trained_rows(self, batch: Batch) -> list[Statement]:
        rows = [_trained_row(group, self.lineage, batch.step) for group in batch.groups]
        tokens = sum(trained for _, _, _, trained, *_ in rows)
        step = (self.lineage, batch.step, batch.version, len(rows), tokens)
        return [*((_TRAIN, row) for row in rows), (_STEP, step)]

    def published(self, version: int) -> None:
        """The engines have ``version`` now."""
        self.store.write((_PUBLISH, (self.lineage, version)))

    def covered(self, steps: int) -> None:
        """A complete checkpoint holds the first ``steps`` steps: nobody goes back before them to train their groups."""
        self.store.write((_COVER, (steps,)))

    def give_up(self, issue_id: int, reason: str) -> None:
        """The prompt will not be trained; its tokens are wasted."""
        group = self._open.pop(issue_id)
        self._stop_running(group)
        self._untaken -= group.place != "taken"
        self._given_up[reason] += 1
        self.waste(group.tokens, group)
        row = (self.lineage, reason, _text(group.attempts), group.wasted, issue_id)
        self.store.write((_GIVE_UP, row), (_FORGET, (issue_id,)))

    @property
    def next_id(self) -> int:
        """The number of the next prompt: how many were ever issued."""
        return self._next_id

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
        return list(self.prompts_by_id().values())

    def prompts_by_id(self) -> dict[int, list[Sample]]:
        """The same by issue number, with those that wait to be issued again."""
        return dict(sorted((g.issue_id, g.prompts) for g in [*self._open.values(), *self.waiting]))

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


# ---- what a store is told


_ISSUE = "INSERT INTO groups (id, prompt, lineage, place, started, attempts) VALUES (?, ?, ?, 'issued', ?, ?)"
_FINISH = """UPDATE groups SET place = 'finished', lineage = ?, sampled = ?, attempts = ?, oldest = ?, newest = ?, length = ?,
    wasted = ? WHERE id = ?"""
_KEEP = "INSERT OR REPLACE INTO payloads VALUES (?, ?)"
_FORGET = "DELETE FROM payloads WHERE id = ?"
_REISSUE = """UPDATE groups SET place = 'issued', lineage = ?, started = ?, attempts = ?, oldest = NULL, newest = NULL,
    length = 0, wasted = ? WHERE id = ?"""
_GIVE_UP = """UPDATE groups SET place = 'given_up', lineage = ?, reason = ?, attempts = ?, length = 0, wasted = ?
    WHERE id = ?"""
_TRAIN = """UPDATE groups SET place = 'trained', lineage = ?, step = ?, oldest = ?, trained = ?, masked = length - ?
    WHERE id = ?"""
_STEP = "INSERT INTO steps VALUES (?, ?, ?, ?, ?)"
_PUBLISH = "INSERT INTO publications VALUES (?, ?)"
_COVER = "DELETE FROM payloads WHERE id IN (SELECT id FROM groups WHERE place = 'trained' AND step < ?)"


def _text(attempts: list[int]) -> str:
    return ",".join(map(str, attempts))


def _newest_for_sure(results: Group) -> int | None:
    """The newest version that any token is from. None where an engine or a hook doesn't tell: it may be any."""
    versions: list[int] = []
    for sample in iter_samples(results):
        told = [span.version for span in sample.version_spans if span.version is not None]
        if len(told) < len(sample.version_spans) or (sample.response_length and not told):
            return None
        versions += told
    return max(versions, default=None)


def _trained_row(group: FinishedGroup, lineage: int, step: int) -> tuple[int, int, int | None, int, int, int]:
    """Lineage, step, version of the oldest trained token, tokens in the loss (twice), number of the group."""
    samples = [s for s in iter_samples(group.samples) if not s.remove_sample]
    trained = [s.effective_response_length for s in samples]
    oldest = [_oldest_trained(s, tokens) for s, tokens in zip(samples, trained, strict=True) if tokens]
    known = min((version for version in oldest if version is not None), default=None)
    tokens = sum(trained)
    return lineage, step, known, tokens, tokens, group.issue_id


def _oldest_trained(sample: Sample, trained: int) -> int | None:
    """Version of the oldest of the ``trained`` tokens in the loss; where spans don't cover them, the oldest it can be."""
    mask, unknown = sample.loss_mask, sample.submit_version
    if mask is None or not sample.version_spans:
        return sample.oldest_version
    spans = [
        (unknown if span.version is None else span.version, sum(mask[span.start : span.end]))
        for span in sample.version_spans
    ]
    if sum(tokens for _, tokens in spans) < trained:
        return sample.oldest_version
    return min((version for version, tokens in spans if tokens and version is not None), default=None)
