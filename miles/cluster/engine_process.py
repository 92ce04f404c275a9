"""One engine process: started, watched by its exit and its health, started again with back-off when it dies.

    spawn ──▶ ready ──▶ up ──▶ exit or failed health checks ──▶ down ──▶ back-off ──▶ spawn

``up`` and ``down`` are awaited before anything goes on, so the routing knows that an engine died before another process
answers at its address: nobody is ever routed to weights that were not published to it. Whatever an engine started ends
with it, and it ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from miles.engine import leash
from miles.engine.client import backoff
from miles.engine.launch import Launch
from miles.errors import EngineError

READY_POLL_S = 0.25
STEADY_S = 60.0
STARTS_WITHOUT_READY = 3
STOP_TIMEOUT_S = 5.0


class EngineStartFailed(EngineError):
    """The engine process ended, or said nothing, before it was ready."""


class EngineProcess:
    """Keeps one engine alive at ``url``."""

    def __init__(
        self,
        launch: Launch,
        url: str,
        log: Path,
        *,
        start_timeout_s: float,
        health_interval_s: float,
        health_timeout_s: float,
    ) -> None:
        self.url = url
        self.restarts = 0
        self._launch = launch
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._health_interval_s = health_interval_s
        self._health_timeout_s = health_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self, up: Callable[[str], Awaitable[None]], down: Callable[[str, str], Awaitable[None]]) -> None:
        """Runs until cancelled. Raises `EngineStartFailed` after three starts in a row that never got ready."""
        failed_starts, delays = 0, backoff(0.5, 30.0)
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._start()
                except EngineStartFailed:
                    failed_starts += 1
                    if failed_starts == STARTS_WITHOUT_READY:
                        raise
                else:
                    failed_starts = 0
                    await up(self.url)
                    await down(self.url, await self._wait_for_end())
                await self.stop()
                self.restarts += 1
                delays = backoff(0.5, 30.0) if time.monotonic() - started > STEADY_S else delays
                await asyncio.sleep(next(delays))
        finally:
            await self.stop()

    async def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:  # noqa: ASYNC230 (a log file, opened once a start)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", leash.__file__, str(os.getpid())),
                *self._launch.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log if self._launch.ready_line is None else asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=self._launch.environ(os.environ),
            )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await self._wait_for_ready(self._process)
        except TimeoutError:
            ready = False
        if not ready:
            code = await self.stop()
            raise EngineStartFailed(
                f"engine {self.url} was not ready within {self._start_timeout_s:g} s (exit code {code}); "
                f"the end of {self._log}:\n{_tail(self._log)}"
            )

    async def _wait_for_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Whether it got ready, as opposed to ended or said something else."""
        if self._launch.ready_line is not None:
            assert process.stdout is not None
            return self._launch.ready_line.encode() in await process.stdout.readline()
        async with self._session() as session:
            while not await _ended_within(process, READY_POLL_S):
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(self.url + "/health") as reply:
                        if reply.status == 200:
                            return True
        return False

    async def _wait_for_end(self) -> str:
        """Why the process is gone, or of no use any more."""
        assert self._process is not None
        async with self._session() as session:
            while not await _ended_within(self._process, self._health_interval_s):
                try:
                    async with session.get(self.url + "/health") as reply:
                        if reply.status != 200:
                            return f"a health check was answered {reply.status}"
                except (aiohttp.ClientError, TimeoutError) as error:
                    return f"no answer to a health check in {self._health_timeout_s:g} s ({type(error).__name__})"
        return f"engine process ended with exit code {self._process.returncode}"

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._health_timeout_s))

    async def stop(self) -> int | None:
        """Ends the process, if any, and all that it started: politely, after 5 s (or when cancelled) by force.

        Returns its exit code.
        """
        process = self._process
        if process is None:
            return None
        try:
            _signal_group(process.pid, signal.SIGTERM)
            await _ended_within(process, STOP_TIMEOUT_S)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
        self._process = None
        return await process.wait()


async def _ended_within(process: asyncio.subprocess.Process, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    return process.returncode is not None


def _signal_group(group: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, sign)


def _tail(path: Path, lines: int = 8) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
