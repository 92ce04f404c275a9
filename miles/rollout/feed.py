"""Running groups on one side, batches for the trainer on the other: what `Rollouts` takes its batches from.

`WorkerFeed` drains the buffer that the worker fills; `FunctionFeed` calls a user's own rollout function, one step's input
at a time.
"""

from __future__ import annotations

import asyncio
import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Protocol

from miles.errors import HookError
from miles.hooks import hook_failed
from miles.loops import Changes
from miles.rollout.admission import Bounds
from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.data_buffer import DataBuffer
from miles.rollout.ledger import Ledger
from miles.rollout.staleness import Versions, finished_group, is_stale
from miles.rollout.worker import RolloutWorker
from miles.types import FinishedGroup, Group, Sample


class Feed(Protocol):
    """Gives batches. ``changes`` is notified whenever something it waits for changed."""

    changes: Changes

    async def run(self) -> None: ...

    async def take(self, step: int) -> list[FinishedGroup]: ...

    def pause_starts(self) -> None: ...

    def resume_starts(self) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def open_prompts(self) -> list[list[Sample]]: ...


class WorkerFeed:
    """Oldest groups first, none older than the bound: what got too old is issued again or given up."""

    def __init__(
        self,
        worker: RolloutWorker,
        buffer: DataBuffer,
        ledger: Ledger,
        versions: Versions,
        *,
        bounds: Bounds,
        retry_unused: bool,
    ) -> None:
        self.changes = buffer.changes
        self._worker = worker
        self._buffer = buffer
        self._ledger = ledger
        self._versions = versions
        self._bounds = bounds
        self._retry_unused = retry_unused

    async def run(self) -> None:
        await self._worker.run()

    async def take(self, step: int) -> list[FinishedGroup]:
        """The groups of the step that starts now. A cancelled take loses none: they leave the buffer at once or not."""
        await self.changes.wait_until(self._batch_is_ready)
        return self.take_nowait(self._bounds.batch_groups)

    def take_nowait(self, count: int) -> list[FinishedGroup]:
        """The ``count`` oldest finished groups, fewer where there are fewer, in issue order."""
        groups = sorted(self._buffer.take(count), key=lambda g: g.issue_id)
        self._ledger.take(g.issue_id for g in groups)
        return groups

    def commit(self) -> None:
        """What was taken last has been trained."""
        self._versions.end_step()
        self._ledger.commit()
        self.changes.notify()

    def raise_version(self, version: int) -> None:
        """The engines have ``version`` now."""
        self._versions.raise_to(version)
        self.changes.notify()

    @property
    def buffered(self) -> int:
        """Finished groups that wait."""
        return len(self._buffer)

    def _batch_is_ready(self) -> bool:
        for group in self._buffer.remove_if(lambda g: is_stale(g, self._versions.current, self._bounds.staleness)):
            if not (self._retry_unused and self._worker.issue_again(group.issue_id)):
                self._ledger.give_up(group.issue_id, "stale")
                self.changes.notify()
        return self._buffer.has(self._bounds.batch_groups)

    def pause_starts(self) -> None:
        self._worker.pause_starts()

    def resume_starts(self) -> None:
        self._worker.resume_starts()

    def status(self) -> dict[str, Any]:
        """What is running and waiting now, for the live view."""
        return {
            "buffer_groups": self.buffered,
            "buffer_capacity": self._bounds.buffer_groups,
            "running_samples": self._worker.running_samples,
            "generation_waits_for": self._worker.verdict(),
        }

    def open_prompts(self) -> list[list[Sample]]:
        return self._ledger.open_prompts()


class FunctionFeed:
    """A user's rollout function by path: called with one step's input, at most one call ahead (``ahead``)."""

    def __init__(
        self, function: Any, path: str, args: Namespace, source: Any, ledger: Ledger, versions: Versions, *,
        ahead: bool, interval: int, total_steps: int,
    ) -> None:  # fmt: skip
        self.changes = Changes()
        self._path = path
        self._ledger = ledger
        self._versions = versions
        self._ahead = ahead
        self._interval = interval
        self._total_steps = total_steps
        self._function: Callable[..., Any] = function
        self._arguments: Callable[[RolloutFnTrainInput], tuple[Any, ...]] = lambda given: (
            args,
            given.rollout_id,
            source,
        )
        if inspect.isclass(function):
            made: Any = function
            self._function = made(RolloutFnConstructorInput(args, source)).__call__
            self._arguments = lambda given: (given,)
        self._calls: asyncio.TaskGroup | None = None
        self._next: tuple[int, asyncio.Task[list[Group]]] | None = None

    async def run(self) -> None:
        """Lives until cancelled, or until a call fails."""
        async with asyncio.TaskGroup() as self._calls:
            self.changes.notify()
            await asyncio.Event().wait()

    async def take(self, step: int) -> list[FinishedGroup]:
        await self.changes.wait_until(lambda: self._calls is not None)
        if self._next is None or self._next[0] != step:
            self._start(step, self._versions.current)
        assert self._next is not None
        groups = await asyncio.shield(self._next[1])
        self._next = None
        if not groups:
            raise HookError(f"rollout function {self._path} returned no groups for step {step}")
        if self._ahead and step + 1 < self._total_steps:
            self._start(step + 1, self._versions.current + ((step + 1) % self._interval == 0))
        return [self._finished(group) for group in groups]

    def _start(self, step: int, version: int) -> None:
        assert self._calls is not None
        call = self._call(RolloutFnTrainInput(step, version))
        self._next = (step, self._calls.create_task(call, name=f"rollout-function-{step}"))

    async def _call(self, given: RolloutFnTrainInput) -> list[Group]:
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(*self._arguments(given))
            else:
                result = await asyncio.to_thread(self._function, *self._arguments(given))
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            raise hook_failed(self._path, self._function, error, f"step {given.rollout_id}") from error
        return result.samples if isinstance(result, RolloutFnTrainOutput) else result

    def _finished(self, samples: Group) -> FinishedGroup:
        group = self._ledger.issue(samples)
        self._ledger.finish(group, samples)
        self._ledger.take([group.issue_id])
        return finished_group(group.issue_id, samples)

    def pause_starts(self) -> None:
        """A call that runs goes on; none starts during an evaluation, as steps wait for it."""

    def resume_starts(self) -> None:
        """See `pause_starts`."""

    def status(self) -> dict[str, Any]:
        return {"generation_waits_for": "start" if self._next else "the next step"}

    def open_prompts(self) -> list[list[Sample]]:
        return self._ledger.open_prompts()
