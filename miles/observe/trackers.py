"""Metrics go in by step, an experiment tracker's own files come out; trackers stand beside the run folder, never for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Where metrics go besides the run folder. Whatever it raises, the run goes on without it."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training metrics come in increasing steps; ``eval/*`` ones have their own axis and come in any order."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes one event file into ``folder`` with tensorboard's own writer, which needs no torch.

    Each tag has its own axis there, so a late evaluation is kept. ``start_step`` (of a resumed run: the step it goes
    on after) hides what an earlier process wrote for later steps.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, start_step: int = 0, clock: Callable[[], float] = time.time) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._clock = clock
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if start_step:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=clock(), step=start_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=self._clock(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
