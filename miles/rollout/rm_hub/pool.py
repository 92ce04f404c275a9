"""Answers in, verdicts out, from processes that each check one answer at a time and are replaced when they don't return.

who waits            for what                          who wakes it
score()              a free process (semaphore, FIFO)  whoever leaves one
its process's reply  the answer, at most the limit     the process, its end, or the clock
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import miles
from miles.errors import RewardFailed, raising_first_cause
from miles.rollout.rm_hub.rm_types import Reward, find, score_in_place
from miles.rollout.rm_hub.scorer import NO_METADATA, ScorerStatistics

START_TIMEOUT_S = 120.0
"""Seconds that a process may take to start, and for the imports of a type."""


class ProcessScorer:
    """A `Scorer` on ``processes`` processes with a hard limit of ``timeout_s`` seconds for each answer.

    An answer that reaches the limit is "not verified": reward 0, counted, its process killed. A process that dies is no
    verdict: RewardFailed. Either way, as after a cancelled `score`, whoever next needs the place starts a new process.
    Bound to the loop that first uses it.
    """

    def __init__(self, *, processes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._places = [_Place(timeout_s) for _ in range(processes)]
        self._idle = deque(self._places)
        self._free = asyncio.Semaphore(processes)
        self._closed = False
        self._scored = 0
        self._timed_out = 0
        self._failed = 0

    async def start(self) -> None:
        """Starts every process now; otherwise the first answers do. Raises RewardFailed where one can't start."""
        with raising_first_cause():
            async with asyncio.TaskGroup() as starting:
                for _ in self._places:
                    starting.create_task(self._start_one())

    async def _start_one(self) -> None:
        async with self._place():
            return

    async def score(self, rm_type: str, response: str, label: str, metadata: Mapping[str, Any] = NO_METADATA) -> Reward:
        try:
            if find(rm_type).cheap:
                reward = score_in_place(rm_type, response, label, metadata)
            else:
                reward = await self._ask(rm_type, response, label, metadata)
        except TimeoutError:
            self._timed_out += 1
            reward = 0.0
        except RewardFailed:
            self._failed += 1
            raise
        self._scored += 1
        return reward

    async def _ask(self, rm_type: str, response: str, label: str, metadata: Mapping[str, Any]) -> Reward:
        """A process's verdict. Raises TimeoutError where it doesn't come in time, RewardFailed where there is none."""
        request = {"rm_type": rm_type, "response": response, "label": label, "metadata": dict(metadata)}
        try:
            line = _line(request)
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"{rm_type}: the sample's metadata can't be sent to a process: {error}") from error
        async with self._place() as place:
            reply = await place.load(rm_type)
            if "error" not in reply:
                async with asyncio.timeout(self._timeout_s):
                    reply = await place.ask(line)
        if "error" in reply:
            raise RewardFailed(reply["error"])
        reward: Reward = reply["reward"]
        return reward

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A user's function may block: it gets a thread."""
        return await asyncio.to_thread(function, *arguments)

    def statistics(self) -> ScorerStatistics:
        return ScorerStatistics(self._scored, self._timed_out, self._failed)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [p.pid for p in self._places if p.pid is not None]

    async def close(self) -> None:
        """Ends every process; whoever still waits for a verdict gets RewardFailed. Twice is fine."""
        self._closed = True
        for place in self._places:
            place.kill()
        for _ in self._places:
            await self._free.acquire()
        for place in self._places:
            await place.wait_ended()
            self._free.release()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[_Place]:
        """A ready process to oneself. Whatever cuts its use short ends it: none is left in the middle of an answer."""
        async with self._free:
            place = self._idle.popleft()
            try:
                self._refuse_if_closed()
                await place.start()
                self._refuse_if_closed()
                yield place
            except BaseException:  # the invariant above
                place.kill()
                raise
            finally:
                self._idle.append(place)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RewardFailed("the reward processes are closed")


class _Place:
    """One process, or room for one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._loaded: set[str] = set()
        self._ended: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Makes sure that a process is ready. Raises RewardFailed where it can't be."""
        if self.pid is not None:
            return
        self.kill()
        await self.wait_ended()
        self._loaded.clear()
        root = str(Path(miles.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-P", "-m", "miles.rollout.rm_hub.score_process", str(self._timeout_s))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, env=os.environ | {"PYTHONPATH": path}
            )
            async with asyncio.timeout(START_TIMEOUT_S):
                await _read_reply(self._process)
        except TimeoutError:
            raise RewardFailed(f"a reward process took more than {START_TIMEOUT_S:.0f} s to start") from None
        except OSError as error:
            raise RewardFailed(f"a reward process can't be started: {error}") from error

    async def load(self, rm_type: str) -> dict[str, Any]:
        """Makes sure that a type's imports are done; the reply says why not, where they fail."""
        if rm_type in self._loaded:
            return {}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self.ask(_line({"load": rm_type}))
        except TimeoutError:
            raise RewardFailed(f"the imports of {rm_type} took more than {START_TIMEOUT_S:.0f} s") from None
        if "error" not in reply:
            self._loaded.add(rm_type)
        return reply

    async def ask(self, request: bytes) -> dict[str, Any]:
        """The reply to one request. Raises RewardFailed where the process dies over it."""
        process = self._process
        assert process is not None and process.stdin is not None, "asked before start()"
        with suppress(ConnectionError):  # then there is no reply either, and its exit code says more
            process.stdin.write(request)
            await process.stdin.drain()
        return await _read_reply(process)

    def kill(self) -> None:
        """Ends the process at once; `wait_ended` collects it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._ended, self._process = self._process, None

    async def wait_ended(self) -> None:
        if self._ended is not None:
            await self._ended.wait()
            self._ended = None


def _line(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


async def _read_reply(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise RewardFailed(f"reward process {process.pid} died with exit code {await process.wait()}")
    reply: dict[str, Any] = json.loads(line)
    return reply
