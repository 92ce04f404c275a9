"""What happens in a run goes in as it happens; a terminal sees a live panel, a pipe or a log file sees plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live

from miles.observe.board import Board
from miles.observe.lines import eval_line, event_line
from miles.observe.snapshot import Snapshot

QUIET_S = 60.0
"""Seconds without a plain line after which a snapshot is worth one."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read the output has gone; the run goes on without it."""
        self.quiet = True


class LiveView:
    """Shows a run while the ``with`` block lasts. ``steps_total`` is the step it ends with, ``start_step`` the last one
    that had ended before (0, or where a resumed run goes on); ``clock`` gives seconds, on any origin."""

    def __init__(
        self,
        title: str,
        steps_total: int,
        *,
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or _Console()
        self._clock = clock
        self._board = Board(title, steps_total, start_step, clock)
        self._live: Live | None = None
        self._last_line_s = clock()
        if self._console.is_interactive:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, get_renderable=self._board.panel
            )

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step ``step`` has ended."""
        self._board.step(step, metrics)
        self._show(self._board.step_line)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy after training step ``step`` was evaluated."""
        self._board.evaluation(step, metrics)
        self._show(lambda: eval_line(step, metrics))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened beside the steps: an engine was restarted, a group given up."""
        self._board.event(kind, fields)
        self._show(lambda: event_line(kind, fields))

    def status(self, snapshot: Snapshot) -> None:
        """The ring as it is now: redraws the panel; in plain lines only after ``QUIET_S`` without any."""
        self._board.snapshot = snapshot
        if self._live is not None or self._clock() - self._last_line_s >= QUIET_S:
            self._show(self._board.waiting_line)

    def finish(self, cause: str | None, left: Mapping[str, Path]) -> None:
        """Takes the panel away and leaves a summary: ``cause`` None means that all went well; ``left`` names paths."""
        self._stop()
        self._console.print(self._board.summary(cause, left), soft_wrap=True)

    def _show(self, line: Callable[[], str]) -> None:
        if self._live is not None:
            self._live.refresh()
        else:
            self._console.print(line(), markup=False, highlight=False, soft_wrap=True)
            self._last_line_s = self._clock()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
