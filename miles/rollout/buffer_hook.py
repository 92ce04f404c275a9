"""Finished groups through a user's data buffer to the trainer: what it may do, and what stays true whatever it does.

    worker ── accept ──▶ hook.put(...)      hook.get(current_version=...) ──▶ drawn, one batch ──▶ take

The draw asks the hook for a group while a step lacks one, and is woken by takes and evictions. What is drawn is judged
like any other group, so nothing older than the bound is trained. Ending the feed cancels whoever waits inside the hook.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from miles.errors import HookError, MilesError
from miles.hooks import hook_failed, load_function, metrics_of
from miles.loops import Changes
from miles.rollout.data_buffer import DataBuffer
from miles.rollout.feed import WorkerFeed
from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput
from miles.rollout.ledger import Ledger, OpenGroup
from miles.rollout.staleness import finished_group
from miles.types import FinishedGroup, Group, Sample, first_sample, iter_samples

PREFIX = "rollout/fully_async/"


class HookedBuffer:
    """A user's data buffer. Groups are told by their `Sample` objects: `get` may give any list of those that were put."""

    def __init__(self, path: str, args: Namespace, ledger: Ledger, drawn: DataBuffer) -> None:
        self.changes: Changes = drawn.changes
        self.discard: Callable[[int, str], None]
        self._path = path
        self._ledger = ledger
        self._drawn = drawn
        self._waiting: set[int] = set()
        self._issue_of: dict[int, tuple[int, Sample]] = {}
        with self._failing_as("", "its construction"):
            self._hook = load_function(path)(DataBufferConstructorInput(args, self._unused))

    def __len__(self) -> int:
        """Groups that were put and neither came out nor were handed on as unused."""
        return len(self._waiting)

    async def accept(self, group: OpenGroup, samples: Group) -> None:
        """Awaits the hook's `put`."""
        self._issue_of |= {id(s): (group.issue_id, s) for s in (*group.prompts, *iter_samples(samples))}
        self._waiting.add(group.issue_id)
        with self._failing_as("put", _name(samples)):
            await self._hook.put(DataBufferInput(group.prompts, samples))

    async def draw(self, version: int) -> FinishedGroup:
        """Awaits the hook's `get`. Raises HookError where what it gives is no group that waits in it."""
        with self._failing_as("get", f"a batch of version {version}"):
            group = await self._hook.get(current_version=version)
        issue_id = self._take_out("get gave", group)
        return finished_group(issue_id, group)

    def metrics(self) -> dict[str, float]:
        """What the hook's `get_metrics` gives."""
        self._issue_of = {k: v for k, v in self._issue_of.items() if self._ledger.place_of(v[0]) is not None}
        with self._failing_as("get_metrics", "its metrics"):
            given = self._hook.get_metrics()
        return metrics_of(f"{self._path}: get_metrics", given, PREFIX)

    def close(self, cause: BaseException | None = None) -> None:
        """Whoever waits for a batch learns why none will come."""
        self._drawn.close(cause)

    def _unused(self, given: Group | DataBufferInput) -> None:
        group = given.group if isinstance(given, DataBufferInput) else given
        issue_id = self._take_out("unused_handler_fn got", group)
        aborted = any(s.status is Sample.Status.ABORTED for s in iter_samples(group))
        self.discard(issue_id, "aborted" if aborted else "unused")

    def _take_out(self, act: str, group: Any) -> int:
        """The issue id of a group that leaves the hook."""
        if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in iter_samples(group)):
            raise HookError(f"{self._path}: {act} {group!r:.100}; a group (a list of Sample) that was put works")
        samples, name = list(iter_samples(group)), _name(group)
        owners = {self._issue_of[id(s)][0] if id(s) in self._issue_of else None for s in samples}
        if None in owners:
            raise HookError(f"{self._path}: {act} {name}, which never was put, or was trained or given up before")
        if len(owners) > 1 or len({id(s) for s in samples}) < len(samples):
            raise HookError(f"{self._path}: {act} {name}, which mixes groups or holds a sample twice")
        (issue_id,) = (owner for owner in owners if owner is not None)
        if issue_id not in self._waiting:
            raise HookError(f"{self._path}: {act} {name} twice: it had left the buffer before")
        self._waiting.remove(issue_id)
        return issue_id

    @contextmanager
    def _failing_as(self, method: str, on: str) -> Iterator[None]:
        try:
            yield
        except MilesError:
            raise
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            function = getattr(type(self._hook), method) if method else load_function(self._path).__init__
            raise hook_failed(f"{self._path}: {method}" if method else self._path, function, error, on) from error


class HookedFeed(WorkerFeed):
    """A `WorkerFeed` whose buffer holds no more than what the step that waits lacks: the rest waits in the hook."""

    def __init__(self, hook: HookedBuffer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hook = hook
        self._wanted = 0
        hook.discard = self.discard

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run(), name="worker")
            tasks.create_task(self._draw(), name="draw")

    async def _draw(self) -> None:
        while True:
            await self.changes.wait_until(lambda: len(self._buffer) < self._wanted)
            try:
                self._buffer.put(await self._hook.draw(self._versions.current))
            except MilesError as error:
                self._buffer.close(error)
                raise

    async def take(self, step: int) -> list[FinishedGroup]:
        self._want(self._bounds.batch_groups)
        return await super().take(step)

    def take_nowait(self, count: int) -> list[FinishedGroup]:
        """As many as are drawn; those that are lacking are drawn for the next call."""
        self._want(count)
        taken = super().take_nowait(count) if len(self._buffer) else []
        self._wanted -= len(taken)
        return taken

    def _want(self, count: int) -> None:
        self._wanted = count
        self.changes.notify()

    @property
    def buffered(self) -> int:
        return len(self._buffer) + len(self._hook)

    def metrics(self) -> Mapping[str, float]:
        return self._hook.metrics()


def _name(group: Group) -> str:
    return f"the group of sample {first_sample(group).index}"
