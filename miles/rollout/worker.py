"""Prompts go in from the data source, scored groups come out into the buffer, and it never stops while training runs.

    loop              consumes             waits for                                   is woken by
    feeder            retries, prompts     admission: slots, credit, buffer, no eval   every change of those
    group (one task)  its prompt           its samples, then its rewards               engines, scorer
    sample            an engine's reply    the engine, within the sample's time limit  the reply or the clock

What happens to a group that fails: a sample is issued again within its budget; past it, its whole group is given up with
the reason, and too many given-up groups in a row stop the worker with the first cause.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles.engine.client import EngineClient
from miles.errors import (
    EngineFailed,
    EngineRefused,
    HookError,
    RewardFailed,
    TooManyFailures,
    WorkerDied,
    first_cause,
)
from miles.loops import Changes
from miles.rollout import admission
from miles.rollout.admission import Bounds, Load, Verdict
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.generation import Generate, GenerateState, sampling_seed, stamp
from miles.rollout.ledger import Ledger, OpenGroup
from miles.rollout.scoring import Scoring
from miles.rollout.staleness import Versions
from miles.types import Group, Sample, iter_samples

REJECTED_IN_ROW = 1000
"""A filter that rejects so many groups one after the other would reject for ever: it stops the run."""
UNFINISHED = (Sample.Status.ABORTED, Sample.Status.FAILED)


class Source(Protocol):
    """Where prompts come from: the contract's DataSource."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]: ...


class Buffer(Protocol):
    """Where finished groups go: `data_buffer.DataBuffer`, or a user's behind `buffer_hook.HookedBuffer`."""

    changes: Changes

    async def accept(self, group: OpenGroup, samples: Group) -> None: ...

    def close(self, cause: BaseException | None = None) -> None: ...


@dataclass(frozen=True)
class Attempts:
    """The failure policy: ``budget`` attempts after the first, ``timeout_s`` for each, ``failure_limit`` groups in a row."""

    budget: int
    timeout_s: float
    failure_limit: int
    keeps_tokens: bool = False
    partial_groups: bool = False


class SampleGivenUp(Exception):
    """A sample is past its budget: ``reason`` for ledger and metrics, chained to the last failure."""

    def __init__(self, reason: str, cause: BaseException | None) -> None:
        super().__init__(reason, cause)
        self.reason = reason
        self.cause = cause


class RolloutWorker:
    """Keeps as many groups running as admission allows."""

    def __init__(
        self,
        *,
        source: Source,
        state: GenerateState,
        generate: Generate,
        scoring: Scoring,
        bounds: Bounds,
        attempts: Attempts,
        versions: Versions,
        ledger: Ledger,
        buffer: Buffer,
        sampling_params: dict[str, Any],
        rollout_seed: int,
        group_rm: bool = False,
        frees_by_sample: bool = True,
        keep: Callable[[Group], DynamicFilterOutput] | None = None,
    ) -> None:
        self._source = source
        self._state = state
        self._generate = generate
        self._scoring = scoring
        self._bounds = bounds
        self._attempts = attempts
        self._versions = versions
        self._ledger = ledger
        self._buffer = buffer
        self._params = sampling_params
        self._seed = rollout_seed
        self._group_rm = group_rm
        self._frees_by_sample = frees_by_sample
        self._keep = keep
        self._retries: deque[OpenGroup] = deque()
        self._running = 0
        self._generating = 0
        self._failures_in_row = 0
        self._first_failure: BaseException | None = None
        self._rejected_in_row: Counter[str] = Counter()
        self._paused = False
        self._changes: Changes = buffer.changes

    # ---- what others see and say

    @property
    def running_samples(self) -> int:
        return self._running

    @property
    def client(self) -> EngineClient:
        return self._state.client

    def verdict(self) -> Verdict | str:
        """May the next group start, and if not, what holds it back."""
        if self._versions.current == 0:
            return "weights"
        if self._paused:
            return "evaluation"
        rule = admission.may_retry if self._retries else admission.may_start
        return rule(self._bounds, self._load())

    def pause_starts(self) -> None:
        """No new group starts; what runs goes on."""
        self._paused = True

    def resume_starts(self) -> None:
        self._paused = False
        self._changes.notify()

    def issue_again(self, issue_id: int) -> bool:
        """Samples a group anew, if it has attempts left; it starts before new prompts."""
        if not self._ledger.has_attempts_left(issue_id, self._attempts.budget):
            return False
        self._retries.append(self._ledger.reissue(issue_id, self._versions.current))
        self._changes.notify()
        return True

    # ---- the feeder

    async def run(self) -> None:
        """Runs until cancelled, or until something fails: then the buffer is closed with the cause."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._changes.wait_until(lambda: self.verdict() == "start")
                    group = self._next_group()
                    slots = _Slots(self, self._bounds.group_size)
                    groups.create_task(self._run_group(group, slots), name=f"group-{group.issue_id}")
        except asyncio.CancelledError:
            self._buffer.close()
            raise
        except BaseException as error:  # invariant: whoever waits for a batch learns why none will come
            cause = first_cause(error)
            died = WorkerDied(f"generation stopped: {cause}")
            died.__cause__ = cause
            self._buffer.close(died)
            raise died from cause

    def _next_group(self) -> OpenGroup:
        if self._retries:
            return self._retries.popleft()
        if self._ledger.waiting:
            return self._ledger.issue_waiting(self._versions.current)
        (samples,) = self._source.get_samples(1)
        return self._ledger.issue(samples, self._versions.current)

    def _load(self) -> Load:
        return Load(
            running_samples=self._running,
            outstanding=self._ledger.outstanding,
            untaken=self._ledger.untaken,
            buffered=self._ledger.untaken - self._generating,
            steps_due=self._versions.steps_due,
            taken=self._ledger.taken,
        )

    # ---- one group

    async def _run_group(self, group: OpenGroup, slots: _Slots) -> None:
        try:
            samples = await self._sample_all(group, slots)
            if self._group_rm:
                await self._score(samples, group=True)
        except SampleGivenUp as given_up:
            self._give_up(group, given_up)
            return
        finally:
            slots.free_all()
        self._failures_in_row = 0
        self._ledger.finish(group, samples)
        if self._keep is None or self._is_kept(group, self._keep(samples)):
            await self._buffer.accept(group, samples)

    def _is_kept(self, group: OpenGroup, verdict: DynamicFilterOutput) -> bool:
        """Gives a group up that the dynamic filter rejects. Raises `TooManyFailures` where it rejects all there is."""
        if verdict.keep:
            self._rejected_in_row.clear()
            return True
        reason = f"filtered_{verdict.reason}" if verdict.reason else "filtered"
        self._rejected_in_row[reason] += 1
        self._ledger.give_up(group.issue_id, reason)
        self._changes.notify()
        if self._rejected_in_row.total() >= REJECTED_IN_ROW:
            reasons = ", ".join(f"{name} {count}" for name, count in self._rejected_in_row.most_common())
            raise TooManyFailures(
                f"--dynamic-sampling-filter-path rejected {REJECTED_IN_ROW} groups in a row ({reasons}): no batch would fill"
            )
        return False

    def _give_up(self, group: OpenGroup, given_up: SampleGivenUp) -> None:
        self._ledger.give_up(group.issue_id, given_up.reason)
        self._failures_in_row += 1
        if self._failures_in_row == 1:
            self._first_failure = given_up.cause
        self._changes.notify()
        if self._failures_in_row > self._attempts.failure_limit:
            raise TooManyFailures(
                f"{self._failures_in_row} groups in a row were given up (--rollout-failure-limit "
                f"{self._attempts.failure_limit}); first cause: {self._first_failure or given_up.reason}"
            ) from self._first_failure

    # ---- its samples

    async def _sample_all(self, group: OpenGroup, slots: _Slots) -> list[Any]:
        """Every sample generated and scored. Raises `SampleGivenUp`, siblings settled, if one is past its budget."""
        first: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [siblings.create_task(self._sample(i, group, slots)) for i in range(len(group.prompts))]
        except* SampleGivenUp as given_up:
            first = first_cause(given_up)
        if first is not None:
            raise first
        results = [t.result() for t in tasks]
        survivors = [r for r in results if not isinstance(r, SampleGivenUp)]
        if len(survivors) < len(results) and len(survivors) < 2:
            raise next(r for r in results if isinstance(r, SampleGivenUp))
        return survivors

    async def _sample(self, place: int, group: OpenGroup, slots: _Slots) -> Any:
        try:
            try:
                result = await self._attempt_until_done(place, group)
            finally:
                if self._frees_by_sample:
                    slots.free_one()
            if not self._group_rm:
                await self._score(result if isinstance(result, list) else [result], group=False)
            return result
        except SampleGivenUp as given_up:
            if self._attempts.partial_groups:
                return given_up
            raise

    async def _attempt_until_done(self, place: int, group: OpenGroup) -> Sample | list[Sample]:
        """A generated sample, or its compact siblings. Raises `SampleGivenUp` past the budget."""
        sample = group.prompts[place]
        reason, cause = "", None  # type: str, Exception | None
        while group.attempts[place] <= self._attempts.budget:
            given = self._prepare(sample, group, group.attempts[place])
            group.attempts[place] += 1
            try:
                async with asyncio.timeout(self._attempts.timeout_s):
                    result = (await self._generate(given)).samples
            except TimeoutError as error:
                reason, cause = "timeout", error
                cause.args = (f"no response in {self._attempts.timeout_s:g} s (--rollout-sample-timeout-s)",)
            except EngineRefused as error:
                raise SampleGivenUp("refused", error) from error
            except (EngineFailed, HookError) as error:
                reason, cause = ("hook" if isinstance(error, HookError) else "engine"), error
            else:
                parts = result if isinstance(result, list) else [result]
                for part in parts:
                    stamp(part, sample)
                if not any(s.status in UNFINISHED for s in parts):
                    return result
                reason, cause = "aborted", None
            if not self._attempts.keeps_tokens:
                self._ledger.waste(sample.response_length, group)
                sample.reset_for_retry()
        raise SampleGivenUp(reason, cause)

    def _prepare(self, sample: Sample, group: OpenGroup, attempt: int) -> GenerateFnInput:
        if sample.submit_version is None:
            sample.submit_version = self._versions.current
        sample.routing_key = sample.routing_key or f"group-{group.issue_id}"
        seed = sampling_seed(self._seed, sample.index, attempt)
        return GenerateFnInput(self._state, sample, self._params | {"sampling_seed": seed})

    async def _score(self, samples: Sequence[Sample], *, group: bool) -> None:
        wanting = list(iter_samples(list(samples)))
        if not group:
            wanting = [s for s in wanting if s.reward is None]
        try:
            await self._scoring.score(wanting, group=group)
        except (RewardFailed, HookError) as error:
            for sample in wanting:
                sample.status = Sample.Status.FAILED
            raise SampleGivenUp("reward", error) from error

    def _hold(self, samples: int, groups: int) -> None:
        """Takes slots for samples of a group that generates, or (negative) gives them back."""
        self._running += samples
        self._generating += groups
        self._changes.notify()


class _Slots:
    """The slots that one group holds from its start; each is given back once, the last one with the group."""

    def __init__(self, worker: RolloutWorker, count: int) -> None:
        self._worker = worker
        self._held = count
        worker._hold(count, 1)

    def free_one(self) -> None:
        self._free(min(1, self._held))

    def free_all(self) -> None:
        self._free(self._held)

    def _free(self, count: int) -> None:
        if count:
            self._held -= count
            self._worker._hold(-count, 0 if self._held else -1)
