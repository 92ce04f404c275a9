"""One step's input to a user's own rollout function in, the batch that it returns out; at most one call ahead."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from miles.errors import HookError
from miles.hooks import metrics_of
from miles.loops import Changes
from miles.rollout.base_types import RolloutFnTrainInput, RolloutFnTrainOutput
from miles.rollout.ledger import Ledger
from miles.rollout.rollout_function import RolloutFunction
from miles.rollout.staleness import Versions, finished_group
from miles.types import FinishedGroup, Group, Sample, iter_samples


class RecordingSource:
    """A data source that remembers what was drawn since ``drawn`` was last cleared, for checkpoints."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.drawn: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = self._source.get_samples(num_samples)
        self.drawn += groups
        return groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class FunctionFeed:
    """Calls ``function``, in one of the forms of `RolloutFunction`."""

    def __init__(
        self,
        function: Any,
        path: str,
        args: Namespace,
        source: Any,
        ledger: Ledger,
        versions: Versions,
        *,
        batch_groups: int,
        ahead: bool,
        interval: int,
        total_steps: int,
    ) -> None:
        self.changes = Changes()
        self._path = path
        self._source = RecordingSource(source)
        self._ledger = ledger
        self._versions = versions
        self._batch_groups = batch_groups
        self._ahead = ahead
        self._interval = interval
        self._total_steps = total_steps
        self.function = RolloutFunction(function, path, args, self._source)
        self._calls: asyncio.TaskGroup | None = None
        self._next: tuple[int, asyncio.Task[tuple[list[Group], dict[str, float]]]] | None = None
        self._metrics: dict[str, float] = {}

    async def run(self) -> None:
        """Lives until cancelled, or until a call fails."""
        async with asyncio.TaskGroup() as self._calls:
            self.changes.notify()
            await asyncio.Event().wait()

    async def take(self, step: int) -> list[FinishedGroup]:
        """The groups of the step that starts now; the call for the next one starts with it."""
        await self.changes.wait_until(lambda: self._calls is not None)
        if self._next is None or self._next[0] != step:
            self._start(step, self._versions.current)
        assert self._next is not None
        groups, self._metrics = await asyncio.shield(self._next[1])
        self._next = None
        self._source.drawn.clear()
        finished = [self._finished(group) for group in groups]
        if self._ahead and step + 1 < self._total_steps:
            self._start(step + 1, self._versions.current + ((step + 1) % self._interval == 0))
        return finished

    def _start(self, step: int, version: int) -> None:
        assert self._calls is not None
        call = self._call(RolloutFnTrainInput(step, version))
        self._next = (step, self._calls.create_task(call, name=f"rollout-function-{step}"))

    async def _call(self, given: RolloutFnTrainInput) -> tuple[list[Group], dict[str, float]]:
        result = await self.function(given)
        output = result if isinstance(result, RolloutFnTrainOutput) else RolloutFnTrainOutput(result)
        self._check(output.samples, given.rollout_id)
        return output.samples, metrics_of(self._path, output.metrics, "rollout/")

    def _check(self, groups: Any, step: int) -> None:
        whole = isinstance(groups, list) and all(isinstance(g, list) and g for g in groups)
        if not whole or not all(isinstance(s, Sample) for g in groups for s in iter_samples(g)):
            raise HookError(
                f"{self._path} returned no list of groups (lists of Sample) for step {step}: {groups!r:.200}"
            )
        if len(groups) != self._batch_groups:
            wanted = f"--rollout-batch-size {self._batch_groups} are needed"
            raise HookError(f"{self._path} returned {len(groups)} groups for step {step}; {wanted}")

    def _finished(self, samples: Group) -> FinishedGroup:
        group = self._ledger.issue(list(iter_samples(samples)))
        self._ledger.finish(group, samples)
        self._ledger.take([group.issue_id])
        return finished_group(group.issue_id, samples)

    def pause_starts(self) -> None:
        """A call that runs goes on; none starts during an evaluation, as steps wait for it."""

    def resume_starts(self) -> None:
        """See `pause_starts`."""

    def status(self) -> dict[str, Any]:
        return {"generation_waits_for": "start" if self._next else "end"}

    def open_prompts(self) -> list[list[Sample]]:
        """What is being trained, and what the call ahead has drawn."""
        return [*self._ledger.open_prompts(), *self._source.drawn]

    def metrics(self) -> dict[str, float]:
        """What the function returned beside the batch that was taken last."""
        return self._metrics
