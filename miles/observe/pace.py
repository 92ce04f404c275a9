"""Ends of steps go in with their times, the recent pace and the time that is left come out."""

from __future__ import annotations

from collections import deque

PACE_STEPS = 20


class Pace:
    """Progress of a run to step ``steps_total``; the pace is that of the last ``PACE_STEPS``. Seconds, on any origin."""

    def __init__(self, start_step: int, steps_total: int, now: float) -> None:
        self.step, self.steps_total = start_step, steps_total
        self._started = now
        self._marks = deque([(start_step, now)], maxlen=PACE_STEPS + 1)

    def mark(self, step: int, now: float) -> None:
        """Step ``step`` has ended."""
        self.step = step
        if len(self._marks) == 2 and self._marks[0][1] == self._started:
            self._marks.popleft()  # the first step's time has the start-up in it
        self._marks.append((step, now))

    @property
    def seconds_per_step(self) -> float | None:
        """None before the first step."""
        (first, since), (last, until) = self._marks[0], self._marks[-1]
        return (until - since) / (last - first) if last > first else None

    def elapsed_s(self, now: float) -> float:
        return now - self._started

    def left_s(self, now: float) -> float | None:
        """Seconds to the end of the last step, less what the running one has already taken; None before the first step."""
        pace = self.seconds_per_step
        if pace is None:
            return None
        return max(0.0, (self.steps_total - self.step) * pace - (now - self._marks[-1][1]))
