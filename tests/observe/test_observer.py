"""What the driver tells once reaches everybody, and nobody but the run folder can end a run."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import miles.observe.observer as observer_module
from miles.observe.history import History
from miles.observe.live import LiveView
from miles.observe.observer import Observer
from miles.observe.run_folder import RunFolder, read_lines
from miles.observe.snapshot import Snapshot


class Recording:
    """A tracker that remembers, and fails from its ``fails_at``-th log on."""

    def __init__(self, name: str = "recording", fails_at: int | None = None) -> None:
        self.name = name
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.calls = 0
        self.closed = 0
        self._fails_at = fails_at

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        if self._fails_at is not None and self.calls >= self._fails_at:
            raise RuntimeError("server gone")
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class Run:
    """An observer over a fresh folder whose view writes into ``shown``."""

    def __init__(self, path: Path, *trackers: Recording) -> None:
        self.console = Console(file=io.StringIO(), width=200)
        self.folder = RunFolder(path)
        self.observer = Observer(self.folder, LiveView("run", 10, console=self.console))
        for tracker in trackers:
            self.observer.attach(tracker.name, lambda tracker=tracker: tracker)

    @property
    def shown(self) -> str:
        return self.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    def failures(self) -> list[tuple[str, str]]:
        events = read_lines(self.folder.path / "events.jsonl")
        return [(event["what"], event["error"]) for event in events if event["kind"] == "observer_failed"]


def test_step_and_evaluation_reach_folder_view_and_trackers(tmp_path: Path) -> None:
    tracker = Recording()
    run = Run(tmp_path, tracker)
    run.observer.started(json.dumps({"given": []}))
    run.observer.step(1, {"rollout/raw_reward": 0.5})
    run.observer.evaluation(0, {"eval/aime": 0.25, "eval/aime-truncated_ratio": 0.0})
    history = History.read(tmp_path)
    assert history.series("rollout/raw_reward") == ([1], [0.5])
    assert history.eval_series("eval/aime") == ([0], [0.25])
    assert history.settings == {"given": []}
    assert [step for step, _ in tracker.logged] == [1, 0]
    assert "step 1/10  reward 0.5" in run.shown and "eval of step 0  aime 0.25" in run.shown


def test_events_are_recorded_and_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.observer.event("engine_restarted", engine=1)
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["engine"]) == ("engine_restarted", 1)
    assert run.shown == "engine restarted  engine=1\n"


def test_step_that_goes_back_reaches_nobody_but_the_events(tmp_path: Path) -> None:
    tracker = Recording()
    run = Run(tmp_path, tracker)
    run.observer.step(2, {"train/loss": 2.0})
    run.observer.step(1, {"train/loss": 1.0})
    assert [step for step, _ in tracker.logged] == [2]
    assert len(run.shown.splitlines()) == 1
    assert [e["metrics"] for e in read_lines(tmp_path / "events.jsonl")] == [{"train/loss": 1.0}]


def test_failing_tracker_fails_once_and_the_others_go_on(tmp_path: Path) -> None:
    broken, sound = Recording("broken", fails_at=2), Recording("sound")
    run = Run(tmp_path, broken, sound)
    for step in range(1, 6):
        run.observer.step(step, {"train/loss": 0.5})
    run.observer.close(None)
    assert broken.calls == 2
    assert [step for step, _ in sound.logged] == [1, 2, 3, 4, 5]
    assert (broken.closed, sound.closed) == (0, 1)
    assert run.failures() == [("broken", "RuntimeError: server gone")]
    assert run.shown.count("observer failed  what=broken  error=RuntimeError: server gone") == 1
    assert History.read(tmp_path).steps == 5


def test_failing_view_is_dropped_and_the_record_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(run.console, "print", lambda *_, **__: 1 / 0)
    run.observer.step(1, {})
    run.observer.step(2, {})
    run.observer.status(Snapshot("waiting", "slots", 1, 0, 1, 0, 1, 1, 1))
    run.observer.close(None)
    assert run.failures() == [("live view", "ZeroDivisionError: division by zero")]
    assert History.read(tmp_path).steps == 2


@pytest.mark.parametrize("part", ["draw_all", "write_report"])
def test_failing_drawing_leaves_the_rest_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(folder: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(observer_module, part, fail)
    run = Run(tmp_path)
    run.observer.step(1, {"train/loss": 0.5})
    run.observer.close("interrupted")
    assert [error for _, error in run.failures()] == ["OSError: no space left"]
    assert (tmp_path / "report.html").exists() == ("report.html" in run.shown) == (part == "draw_all")
    assert (tmp_path / "plots" / "training.png").exists() == (part == "write_report")
    assert "interrupted" in run.shown


def test_record_that_cannot_be_written_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    def full(fd: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(OSError, match="No space left"):
        run.observer.step(1, {})


def test_close_leaves_plots_report_and_the_cause_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.observer.started("{}")
    run.observer.step(1, {"rollout/raw_reward": 0.5})
    run.observer.close("no engine for 300 s")
    run.observer.close(None)
    end = History.read(tmp_path).end
    assert end is not None and end["cause"] == "no engine for 300 s"
    assert (tmp_path / "plots" / "reward.png").exists()
    assert "no engine for 300 s" in (tmp_path / "report.html").read_text()
    assert run.shown.count("no engine for 300 s") == 1
    assert str(tmp_path / "report.html") in run.shown


def test_resumed_run_says_where_it_goes_on(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.observer.started("{}")
    first.observer.step(1, {})
    first.observer.close("interrupted")
    second = Run(tmp_path)
    second.observer.started("{}")
    second.observer.step(2, {})
    history = History.read(tmp_path)
    assert [event["after_step"] for event in history.events if event["kind"] == "started"] == [0, 1]
    assert history.series("time").steps == [1, 2]


def test_snapshots_are_shown_not_recorded(tmp_path: Path, clock: Any) -> None:
    run = Run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "events.jsonl").read_bytes()
    run.observer.status(Snapshot("waiting", "slots", 1, 2, 4, 0, 1, 1, 1))
    assert ((tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "events.jsonl").read_bytes()) == before
    run.observer.step(1, {})
    assert "running 2/4" in run.shown
