"""The driver tells what happens, once; run folder, live view and trackers get it, and the end leaves plots and a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from miles.observe.live import LiveView
from miles.observe.plots import draw_all
from miles.observe.report import write_report
from miles.observe.run_folder import RunFolder
from miles.observe.snapshot import Snapshot
from miles.observe.trackers import Tracker


class Observer:
    """Ties them together. Every method is quick and returns when the run folder has its line; `close` draws for seconds.

    The run folder is the record: where it can't be written, OSError stops the run. Nothing else here can.
    """

    def __init__(self, folder: RunFolder, view: LiveView) -> None:
        self.folder = folder
        self._view = view
        self._trackers: list[Tracker] = []
        self._seen, self._closed = True, False

    def started(self, settings_json: str) -> None:
        """The settings are checked and the run begins, or goes on."""
        self.folder.write_settings(settings_json)
        self.event("started", after_step=self.folder.last_step or 0)

    def attach(self, name: str, open: Callable[[], Tracker]) -> None:
        """Opens a tracker, which gets every row from now on; where that fails, the run goes on without it."""
        self._try(name, lambda: self._trackers.append(open()))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step ``step`` (the first is 1) has ended."""
        if self.folder.append_step(step, metrics):
            self._show(partial(self._view.step, step, metrics))
            self._track(step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy after training step ``step`` (0: the untrained one) was evaluated; may come late."""
        self.folder.append_eval(step, metrics)
        self._show(partial(self._view.evaluation, step, metrics))
        self._track(step, metrics)

    def event(self, kind: str, **fields: Any) -> None:
        """Something worth a line happened beside the steps; ``kind`` is one_word_like_this."""
        self.folder.append_event(kind, **fields)
        self._show(partial(self._view.event, kind, fields))

    def status(self, snapshot: Snapshot) -> None:
        """The ring as it is now; shown, not recorded."""
        self._show(partial(self._view.status, snapshot))

    def close(self, cause: str | None) -> None:
        """Ends the record: ``cause`` is None where the run did what it was told. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.folder.append_event("closed", cause=cause)
        for tracker in self._trackers:
            self._try(tracker.name, tracker.close)
        left = {"run folder": self.folder.path}
        self._try("plots", partial(draw_all, self.folder.path))
        if self._try("report", partial(write_report, self.folder.path)):
            left["report"] = self.folder.path / "report.html"
        self._show(partial(self._view.finish, cause, left))
        self.folder.close()

    def _show(self, act: Callable[[], object]) -> None:
        if self._seen:
            self._seen = False  # while it acts: its own failure is an event that it must not be asked to show
            self._seen = self._try("live view", act)

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackers = [t for t in self._trackers if self._try(t.name, partial(t.log, step, metrics))]

    def _try(self, what: str, act: Callable[[], object]) -> bool:
        """False, and an event, where it fails; who fails is asked no more, so that it fails once and not at every step."""
        try:
            act()
        except Exception as error:
            # Broad, for the invariant that only the run folder can end a run, whatever a tracker or a terminal raises.
            self.event("observer_failed", what=what, error=f"{type(error).__name__}: {error}")
            return False
        return True
