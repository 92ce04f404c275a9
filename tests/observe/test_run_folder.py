"""A run folder keeps every line that was written, whatever was killed, and its step axis only goes forward."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.errors import DataError, SettingsError
from miles.observe.history import History
from miles.observe.run_folder import JsonLines, RunFolder, read_lines, read_metrics


def strict(path: Path) -> list[dict[str, Any]]:
    """Rows by a parser that refuses NaN and Infinity, as standard JSON does."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n")[:-1]]


# ---- rows


def test_each_step_is_one_row_with_its_time(tmp_path: Path, clock: Any) -> None:
    folder = RunFolder(tmp_path, clock)
    folder.append_step(1, {"train/loss": 0.5})
    clock.advance(3)
    folder.append_step(2, {"train/loss": 0.25})
    assert strict(tmp_path / "metrics.jsonl") == [
        {"step": 1, "time": clock.now - 3, "train/loss": 0.5},
        {"step": 2, "time": clock.now, "train/loss": 0.25},
    ]


def test_late_evaluation_is_kept_on_its_own_axis(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_step(5, {"rollout/raw_reward": 0.3})
    folder.append_eval(4, {"eval/aime": 0.2})
    folder.append_eval(2, {"eval/aime": 0.1})
    history = History.read(tmp_path)
    assert history.series("rollout/raw_reward") == ([5], [0.3])
    assert history.eval_series("eval/aime") == ([2, 4], [0.1, 0.2])


def test_step_axis_never_goes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    kept = [folder.append_step(step, {"train/loss": float(step)}) for step in (1, 3, 2, 3, 4)]
    assert kept == [True, True, False, False, True]
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 3, 4]
    late = [(e["step"], e["metrics"]) for e in read_lines(tmp_path / "events.jsonl") if e["kind"] == "late_step"]
    assert late == [(2, {"train/loss": 2.0}), (3, {"train/loss": 3.0})]


def test_values_that_json_lacks_become_null_and_come_back_as_nan(tmp_path: Path) -> None:
    values = {"nan": math.nan, "inf": -math.inf, "float32": np.float32(0.5), "float64": np.float64("nan")}
    RunFolder(tmp_path).append_step(1, values)
    (row,) = strict(tmp_path / "metrics.jsonl")
    assert [row[name] for name in values] == [None, None, 0.5, None]
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["nan"]) and math.isnan(row["inf"]) and row["float32"] == 0.5


def test_events_take_any_value_as_its_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_event("checkpoint_saved", path=tmp_path, error=ValueError("a\u2028b"), lines="one\ntwo")
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["path"], event["error"], event["lines"]) == (str(tmp_path), "a\u2028b", "one\ntwo")


# ---- kills and full disks


def test_kill_at_any_byte_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    folder = RunFolder(tmp_path)
    folder.append_step(1, {"train/loss": 0.5})
    folder.append_step(2, {"train/loss": 0.25})
    folder.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        complete = whole[:size].count(b"\n")
        assert [row["step"] for row in read_lines(path)] == [1, 2][:complete]
        again = RunFolder(tmp_path)
        assert again.last_step == (complete or None)
        again.append_step(7, {})
        again.close()
        assert [row["step"] for row in strict(path)] == [*[1, 2][:complete], 7]


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: (writes.append(line), write(fd, line))[1])
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"text": "x" * 100_000})
    lines.append({"b": 2})
    assert len(writes) == 2 and b"".join(writes) == (tmp_path / "x.jsonl").read_bytes()


def test_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    monkeypatch.setattr(os, "write", lambda fd, line: len(line) - 1)
    with pytest.raises(OSError, match=r"x\.jsonl.*disk full"):
        lines.append({"a": 1})


@pytest.mark.parametrize(("line", "why"), [(b"{broken", "not JSON"), (b"[1]", "object is expected, this is list")])
def test_damage_before_the_last_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + line + b'\n{"step":3}\n')
    with pytest.raises(DataError, match=rf"metrics\.jsonl:2: .*{why}"):
        read_lines(path)


def test_folder_without_files_is_an_empty_history(tmp_path: Path) -> None:
    history = History.read(tmp_path)
    assert (history.train, history.evals, history.events, history.settings) == ([], [], [], {})
    assert (history.steps, history.wall_time_s, history.trained_tokens, history.end) == (0, 0.0, 0.0, None)


# ---- resuming


def test_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    first.append_step(1, {})
    first.close()
    second = RunFolder(tmp_path)
    assert second.last_step == 1
    assert not second.append_step(1, {})
    assert second.append_step(2, {})


def test_going_back_sets_later_rows_aside_and_frees_their_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 4):
        folder.append_step(step, {"train/loss": float(step), "train/kl": math.nan})
        folder.append_eval(step, {"eval/aime": float(step)})
    folder.go_back_to(2)
    assert folder.last_step == 2
    assert folder.append_step(3, {"train/loss": 30.0})
    history = History.read(tmp_path)
    assert history.series("train/loss") == ([1, 2, 3], [1.0, 2.0, 30.0])
    assert history.eval_series("eval/aime").steps == [1, 2]
    abandoned = strict(tmp_path / "metrics.abandoned.jsonl")
    assert [row.get("train/loss", row.get("eval/aime")) for row in abandoned] == [3.0, 3.0, 4.0, 4.0]
    assert [(e["step"], e["abandoned_rows"]) for e in history.events if e["kind"] == "went_back"] == [(2, 4)]


def test_going_back_to_the_last_step_changes_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_step(1, {})
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    folder.go_back_to(1)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


# ---- the folder


def test_named_run_lives_under_its_name(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "runs", "first")
    assert folder.path == tmp_path / "runs" / "first" and folder.name == "first"
    folder.close()
    assert RunFolder.open(tmp_path / "runs", "first").path == folder.path


def test_nameless_runs_of_one_second_never_share_a_folder(tmp_path: Path, clock: Any) -> None:
    folders = [RunFolder.open(tmp_path / "runs", None, clock) for _ in range(3)]
    names = [folder.name for folder in folders]
    assert len(set(names)) == 3
    assert names[1:] == [f"{names[0]}_2", f"{names[0]}_3"]


def test_settings_are_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_settings('{"given": ["lr", "seed"]}')
    folder.write_settings('{"given": []}')
    assert History.read(tmp_path).settings == {"given": []}
    assert not list(tmp_path.glob("*.tmp"))


# ---- what history makes of it


def test_second_evaluation_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_eval(2, {"eval/aime": 0.1})
    folder.append_eval(2, {"eval/aime": 0.2})
    assert History.read(tmp_path).eval_series("eval/aime") == ([2], [0.2])


def test_wall_time_leaves_out_the_time_between_processes(tmp_path: Path, clock: Any) -> None:
    folder = RunFolder(tmp_path, clock)
    folder.append_event("started")
    clock.advance(10)
    folder.append_step(1, {})
    clock.advance(1000)
    folder.append_event("started")
    clock.advance(5)
    folder.append_eval(1, {})
    assert History.read(tmp_path).wall_time_s == 15


def test_run_has_ended_only_where_its_last_process_said_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_event("started")
    assert History.read(tmp_path).end is None
    folder.append_event("closed", cause="no engine")
    folder.append_event("observer_failed")
    end = History.read(tmp_path).end
    assert end is not None and end["cause"] == "no engine"
    folder.append_event("started")
    assert History.read(tmp_path).end is None


def test_trained_tokens_add_up_over_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, tokens in enumerate((100.0, math.nan, 250.0), start=1):
        folder.append_step(step, {"rollout/trained_tokens": tokens})
    assert History.read(tmp_path).trained_tokens == 350.0


def test_a_folder_is_written_by_one_run_at_a_time(tmp_path):
    """The lock ends with its owner, so a killed run leaves none."""
    first = RunFolder(tmp_path)
    with pytest.raises(SettingsError, match="another run is writing there"):
        RunFolder(tmp_path)
    first.close()
    RunFolder(tmp_path).close()
