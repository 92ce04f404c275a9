"""Work in, the moment at which it is done out: requests that share an engine, on any clock, without a timer per token.

Up to ``saturation`` requests run at full speed each; more of them share that. Since all running requests get the same
service, one number (the service that each has got so far) orders their ends: one timer serves the engine, for the next end.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from itertools import count


class Job:
    """One request: ``done`` is set when its work has been served, or by whoever stops it earlier."""

    __slots__ = ("begins", "done", "ends", "running")

    def __init__(self, begins: float, ends: float, done: asyncio.Future[None]) -> None:
        self.begins, self.ends, self.done, self.running = begins, ends, done, True


class SharedService:
    """Processor sharing. Times and work are in seconds of an engine that serves the request alone."""

    def __init__(self, saturation: float = math.inf) -> None:
        self.saturation = saturation
        self.served_s = 0.0
        """Work that was served, summed over requests, up to the last change."""
        self._each = 0.0
        self._at = 0.0
        self._jobs = 0
        self._paused = False
        self._heap: list[tuple[float, int, Job]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for = (math.inf, 0.0)

    def begin(self, work_s: float) -> Job:
        """A request of ``work_s`` begins now."""
        self._advance()
        job = Job(self._each, self._each + work_s, asyncio.get_running_loop().create_future())
        self._jobs += 1
        self._push(job)
        return job

    def end(self, job: Job) -> None:
        """The request takes no more service; twice is fine."""
        if job.running:
            self._advance()
            self._leave(job)
            self._arm()

    def received(self, job: Job) -> float:
        """Service that it has had so far."""
        self._advance()
        return min(self._each, job.ends) - job.begins

    def add_work(self, job: Job, work_s: float) -> None:
        """So much more has to be served before the request is done."""
        self._advance()
        job.ends += work_s
        self._push(job)

    def pause(self) -> None:
        """Nobody is served until `resume`."""
        self._advance()
        self._paused = True
        self._arm()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        self._arm()

    @property
    def paused(self) -> bool:
        return self._paused

    # ---- the clock

    def _rate(self) -> float:
        if self._paused or not self._jobs:
            return 0.0
        return min(1.0, self.saturation / self._jobs)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        each = self._rate() * (now - self._at)
        self._each += each
        self.served_s += each * self._jobs
        self._at = now

    def _push(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.ends, next(self._order), job))
        self._arm()

    def _leave(self, job: Job) -> None:
        job.running = False
        self._jobs -= 1

    def _arm(self) -> None:
        """One timer, for the next end at the present rate."""
        heap, rate = self._heap, self._rate()
        while heap and (not heap[0][2].running or heap[0][2].ends != heap[0][0]):
            heapq.heappop(heap)
        ends = heap[0][0] if heap and rate else math.inf
        if self._timer_for == (ends, rate):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_for = None, (ends, rate)
        if ends < math.inf:
            after = max(0.0, (ends - self._each) / rate)
            self._timer = asyncio.get_running_loop().call_at(self._at + after, self._finish, ends)

    def _finish(self, ends: float) -> None:
        self._advance()
        self._each = max(self._each, ends)  # whatever rounding says: this is the moment
        self._timer, self._timer_for = None, (math.inf, 0.0)
        while self._heap and self._heap[0][0] <= self._each:
            job = heapq.heappop(self._heap)[2]
            if job.running and job.ends <= self._each:
                self._leave(job)
                if not job.done.done():
                    job.done.set_result(None)
        self._arm()
