"""Finished groups in by `put`, groups for the trainer out by `get`: what ``--custom-async-data-buffer-path`` names.

A run constructs the class as ``cls(DataBufferConstructorInput(args, unused_handler_fn))``, awaits `put` once for each
finished group and `get` once for each group that a training step lacks. An awaited `put` holds back its own group only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.loops import Changes
from miles.rollout.staleness import finished_group, is_stale
from miles.types import Group, Sample, first_sample, iter_samples

__all__ = [
    "DataBuffer",
    "DataBufferConstructorInput",
    "DataBufferInput",
    "DefaultDataBuffer",
    "Group",
    "first_sample",
    "group_oldest_weight_version",
    "iter_samples",
]


@dataclass(frozen=True)
class DataBufferInput:
    """``prompt_group``: the samples as they were issued; ``group``: what generation and rewards made of them."""

    prompt_group: list[Sample]
    group: Group


@dataclass(frozen=True)
class DataBufferConstructorInput:
    """``unused_handler_fn`` takes a group (or its `DataBufferInput`) that will not be trained: it is dropped or issued
    again, as ``--async-unused-samples-handler`` says, and counted."""

    args: Namespace
    unused_handler_fn: Callable[[Group | DataBufferInput], None]


class DataBuffer(ABC):
    """Where finished groups wait. Called on the rollout's event loop only."""

    @abstractmethod
    async def put(self, input: DataBufferInput) -> None:
        """Takes a finished group. Waiting here is fine: other groups go on."""

    @abstractmethod
    async def get(self, **context: Any) -> Group:
        """The next group to train, made of samples that were put. ``context["current_version"]`` is the version at which
        the step that takes it starts."""

    def get_metrics(self) -> dict[str, Any]:
        """Numbers by name, once for each training step; names without a slash go under ``rollout/fully_async/``."""
        return {}


class DefaultDataBuffer(DataBuffer):
    """First in, first out, at most ``args.async_data_buffer_capacity_factor`` batches: `put` waits while it is full.

    Aborted groups and groups older than ``args.max_weight_staleness`` go to the unused handler. The dynamic filter is
    asked by the run, before `put`.
    """

    def __init__(self, input: DataBufferConstructorInput) -> None:
        self.args = input.args
        self.unused_handler_fn = input.unused_handler_fn
        self.capacity = int(input.args.async_data_buffer_capacity_factor * input.args.rollout_batch_size)
        self._changes = Changes()
        self._inputs: deque[DataBufferInput] = deque()
        self._unused = {"aborted_groups_filtered": 0, "stale_groups_filtered": 0}

    def __len__(self) -> int:
        return len(self._inputs)

    async def put(self, input: DataBufferInput) -> None:
        if any(s.status is Sample.Status.ABORTED for s in iter_samples(input.group)):
            self._hand_on(input, "aborted_groups_filtered")
            return
        await self._changes.wait_until(lambda: len(self) < self.capacity)
        self._inputs.append(input)
        self._changes.notify()

    async def get(self, **context: Any) -> Group:
        while True:
            await self._changes.wait_until(lambda: len(self) > 0)
            input = self._inputs.popleft()
            self._changes.notify()
            if not self._is_stale(input.group, context.get("current_version")):
                return input.group
            self._hand_on(input, "stale_groups_filtered")

    def get_metrics(self) -> dict[str, Any]:
        unused, self._unused = self._unused, dict.fromkeys(self._unused, 0)
        return {"queue_size": len(self), **unused}

    def _is_stale(self, group: Group, version: int | None) -> bool:
        bound = self.args.max_weight_staleness
        return version is not None and bound is not None and is_stale(finished_group(0, group), version, bound)

    def _hand_on(self, input: DataBufferInput, why: str) -> None:
        self._unused[why] += 1
        self.unused_handler_fn(input)


def group_oldest_weight_version(group: Group) -> int | None:
    """The oldest weight version in a group; None where no sample tells one."""
    versions = [s.oldest_weight_version for s in iter_samples(group)]
    return min((v for v in versions if v is not None), default=None)
