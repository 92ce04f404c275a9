"""The public door to the fully-async worker: today's class and the first-era functions, both on one worker.

Inside the rollout actor they are faces of the actor's own worker. Anywhere else `get_global_worker` builds one on the
process's loop (`miles.loops`): it draws prompts from the given data source, asks the engine behind
``args.sglang_router_ip`` / ``_port`` and takes versions from its ``/model_info``.
"""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from argparse import Namespace
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from miles import loops
from miles.config import Settings
from miles.engine.client import version_of
from miles.errors import WorkerDied, raising_first_cause
from miles.rollout.assembly import make_worker_feed
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput, RolloutFnTrainOutput
from miles.rollout.core import make_scorer, standalone
from miles.rollout.feed import WorkerFeed
from miles.rollout.fully_async_data_buffer import group_oldest_weight_version
from miles.rollout.generation import GenerateState
from miles.rollout.ledger import Ledger
from miles.rollout.rm_hub.rewards import Rewards
from miles.rollout.staleness import Versions
from miles.types import Group

__all__ = [
    "AsyncRolloutWorker",
    "FullyAsyncRolloutFn",
    "adopt_feed",
    "generate_rollout_fully_async",
    "get_global_worker",
    "group_oldest_weight_version",
    "stop_global_worker",
]

VERSION_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 10.0
UNKNOWN_VERSION = 1
"""What counts as the version while the router names none: the one that any generation starts with."""


class _CachedWeightVersion:
    """The version that the router's ``/model_info`` names, asked at most every ``ttl`` seconds.

    An old answer is older than the truth, so what it stamps on a sample never makes it fresher than it is. Judging
    staleness needs ``fresh=True``, since there an old answer would make the sample look younger.
    """

    def __init__(self, ttl: float = 1.0) -> None:
        self._ttl = ttl
        self._asked_at = float("-inf")
        self._version: int | None = None

    def get(self, args: Namespace, *, fresh: bool = False) -> int | None:
        if fresh or time.monotonic() - self._asked_at >= self._ttl:
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/model_info"
            with urllib.request.urlopen(url, timeout=VERSION_TIMEOUT_S) as reply:
                self._version = version_of(orjson.loads(reply.read()).get("weight_version"))
            self._asked_at = time.monotonic()
        return self._version


class AsyncRolloutWorker:
    """The first-era worker: ``start`` it, take completed groups from any thread, ``stop`` it.

    Given a ``feed`` it is a face of a worker that somebody else runs; else it runs one of its own.
    """

    def __init__(self, args: Namespace, data_buffer: Any, feed: WorkerFeed | None = None) -> None:
        self.args = args
        self.running = False
        self._version = _CachedWeightVersion()
        self._taken = False
        self._stopping = asyncio.Event()
        self._runs_itself = feed is None
        self._future: Future[None] | None = None
        self.feed = feed or self._own_feed(data_buffer)

    def _own_feed(self, source: Any) -> WorkerFeed:
        settings = Settings.from_namespace(self.args)
        own = replace(settings.rollout, fully_async=True, rollout_function_path=None)
        settings = replace(settings, rollout=own)
        self._rewards = Rewards(self.args, make_scorer(settings))
        versions = Versions()
        core = standalone(self.args, self._rewards, versions, loops.loop())
        self._client = core.client
        return make_worker_feed(
            settings,
            source=source,
            state=GenerateState(self.args, core),
            scoring=self._rewards,
            ledger=Ledger(window=1024),
            versions=versions,
            steps=None,
        )

    @property
    def output_queue(self) -> WorkerFeed:
        return self.feed

    @property
    def worker_thread(self) -> threading.Thread | None:
        return loops.thread()

    def start(self) -> None:
        """Starts generating on the process's loop. Twice is fine."""
        if self._runs_itself and not self.running:
            self.feed.raise_version(self._version.get(self.args, fresh=True) or UNKNOWN_VERSION)
            self._future = asyncio.run_coroutine_threadsafe(self.continuous_worker_loop(), loops.loop())
        self.running = True

    def stop(self) -> None:
        """Ends generation and waits for it. Twice is fine."""
        future, self._future = self._future, None
        self.running = False
        if future is not None:
            loops.loop().call_soon_threadsafe(self._stopping.set)
            with suppress(WorkerDied, TimeoutError):
                future.result(STOP_TIMEOUT_S)

    async def continuous_worker_loop(self) -> None:
        """Generates until `stop`."""
        try:
            with raising_first_cause():
                async with asyncio.TaskGroup() as tasks:
                    generating = tasks.create_task(self.feed.run())
                    await self._stopping.wait()
                    generating.cancel()
        finally:
            await self._rewards.close()
            await self._client.close()

    def worker_thread_func(self) -> None:
        """`continuous_worker_loop` from a thread of the caller's own."""
        loops.run(self.continuous_worker_loop())

    def get_queue_size(self) -> int:
        return self.feed.buffered

    def get_completed_groups(self) -> list[tuple[int, Group]]:
        """Every finished group with its number, in issue order; they leave the buffer. Raises what stopped generation."""

        version = self._version.get(self.args) if self._runs_itself else None

        async def take() -> list[tuple[int, Group]]:
            self._train_what_was_taken(version)
            return [(g.issue_id, g.samples) for g in self.feed.take_nowait(self.feed.buffered)]

        return loops.run(take())

    def _train_what_was_taken(self, version: int | None) -> None:
        """Outside a ring nobody says when a step ends: what was taken counts as trained with the next take."""
        if self._runs_itself:
            if self._taken:
                self.feed.commit()
            self.feed.raise_version(version or UNKNOWN_VERSION)
            self._taken = True

    async def wait_for_batch(self, step: int, version: int | None) -> list[Group]:
        """The groups of one step. Raises what stopped generation."""
        self._train_what_was_taken(version)
        return [g.samples for g in await self.feed.take(step)]


_worker: AsyncRolloutWorker | None = None


def adopt_feed(feed: WorkerFeed, args: Namespace) -> None:
    """Makes `get_global_worker` a face of the worker behind ``feed``, which its owner runs."""
    global _worker
    _worker = AsyncRolloutWorker(args, None, feed)
    _worker.start()


def get_global_worker(args: Namespace, data_buffer: Any) -> AsyncRolloutWorker:
    """The process's worker, started on first use."""
    global _worker
    if _worker is None or not _worker.running:
        _worker = AsyncRolloutWorker(args, data_buffer)
        _worker.start()
    return _worker


def stop_global_worker() -> None:
    """Stops it, if there is one. Twice is fine."""
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.stop()


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[Group]:
    """One step's groups, in issue order. Raises ValueError for evaluation, and what stopped generation."""
    if evaluation:
        raise ValueError("generate_rollout_fully_async makes training batches only; evaluation has --eval-interval")
    worker = get_global_worker(args, data_buffer)
    version = _CachedWeightVersion().get(args, fresh=True)
    return loops.run(worker.wait_for_batch(rollout_id, version))


class FullyAsyncRolloutFn:
    """The class form: constructed once, called for each step."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.data_source = input.data_source

    async def __call__(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        if input.evaluation:
            raise ValueError("FullyAsyncRolloutFn makes training batches only; evaluation has --eval-interval")
        worker = await asyncio.to_thread(get_global_worker, self.args, self.data_source)
        batch = worker.wait_for_batch(input.rollout_id, input.weight_version)
        return RolloutFnTrainOutput(await loops.await_on_loop(batch))
