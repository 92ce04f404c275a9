"""What trackers read back is what was logged, late evaluations included; offline nothing knocks at the network, and no
tracker can end a run or give away its key."""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.config import Problems
from miles.config.explain import explain
from miles.observe import check
from miles.observe.run_folder import read_lines
from miles.observe.trackers import TensorBoard
from tests.virtual import settings_of


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_late_evaluation_is_kept_beside_training(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.log(5, {"train/loss": 0.5, "train/kl": math.nan})
    tracker.log(4, {"eval/aime": 0.25})
    tracker.log(6, {"train/loss": 0.25})
    tracker.log(2, {"eval/aime": 0.125})
    tracker.close()
    read = scalars(tmp_path)
    assert read["train/loss"] == [(5, 0.5), (6, 0.25)]
    assert read["eval/aime"] == [(4, 0.25), (2, 0.125)]
    assert math.isnan(read["train/kl"][0][1])


def test_resumed_run_replaces_the_steps_it_takes_again(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, clock=lambda: 100.0)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    first.close()
    second = TensorBoard(tmp_path, start_step=2, clock=lambda: 200.0)
    second.log(3, {"train/loss": 30.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_observing_needs_no_torch_and_draws_without_a_screen(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import miles.observe.observer; "
        "light = sorted({'torch', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules)); "
        "from miles.observe.trackers import TensorBoard; from miles.observe.run_folder import RunFolder; "
        "folder = Path(sys.argv[1]); tracker = TensorBoard(folder / 'tb'); tracker.log(1, {'a': 1.0}); tracker.close(); "
        "RunFolder(folder).append_step(1, {'train/loss': 0.5}); from miles.observe.plots import draw_all; draw_all(folder); "
        "print(light, sorted({'torch', 'tensorflow', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


KEY = "b64d" * 10
LATE_EVALUATION = """
import sys
from pathlib import Path
from miles.config import Problems, Settings
from miles.observe.live import LiveView
from miles.observe.observer import Observer
from miles.observe.run_folder import RunFolder
from miles.observe.trackers import trackers_of
settings = Settings.parse(sys.argv[2:], Problems())
folder = RunFolder(Path(sys.argv[1]))
observer = Observer(folder, LiveView("run", 10))
observer.started(settings.to_json())
for name, opened in trackers_of(settings, folder.path, 0).items():
    observer.attach(name, opened)
observer.step(5, {"train/loss": 0.5})
observer.evaluation(4, {"eval/aime": 0.25})
observer.step(6, {"train/loss": 0.25})
observer.close(None)
"""


def log_late_evaluation(folder: Path, *flags: str, **environment: str) -> list[str]:
    """Steps 5 and 6 with the evaluation of step 4 between them, in a process of its own; who failed on the way."""
    words = [sys.executable, "-c", LATE_EVALUATION, str(folder), *flags]
    subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=120)
    return [e["what"] for e in read_lines(folder / "events.jsonl") if e["kind"] == "observer_failed"]


def wandb_records(folder: Path) -> list[Any]:
    """The records of the one run below ``folder``: its file is a log in LevelDB's format, after 7 bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.rglob("*.wandb")
    data, at, record, records = file.read_bytes(), 7, b"", []
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(record))
            record = b""
    return records


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """What was logged, in its order, without wandb's own columns."""
    rows = [r.history for r in wandb_records(folder) if r.WhichOneof("record_type") == "history"]
    values = [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in values]


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that hangs up at once, and the peers that it has seen."""
    seen: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, peer = server.accept()
                    seen.append(str(peer))
                    connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", seen
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_wandb_offline_keeps_a_late_evaluation_and_knocks_at_no_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with listening() as (url, seen):
        flags = ("--use-wandb", "--wandb-mode", "offline", "--wandb-host", url, "--wandb-key", KEY)
        assert log_late_evaluation(tmp_path, *flags, HTTP_PROXY=url, HTTPS_PROXY=url) == []
    assert seen == []
    assert wandb_rows(tmp_path) == [
        {"train/step": 5, "train/loss": 0.5},
        {"eval/step": 4, "eval/aime": 0.25},
        {"train/step": 6, "train/loss": 0.25},
    ]
    axes = {m.name: m.step_metric for m in (r.metric for r in wandb_records(tmp_path)) if m.step_metric}
    assert axes == {"train/loss": "train/step", "eval/aime": "eval/step"}
    assert [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()] == []


def test_wandb_draws_evaluations_over_training_steps_where_told(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    flags = "--use-wandb --wandb-mode offline --wandb-always-use-train-step --wandb-dir"
    assert log_late_evaluation(tmp_path / "r", *flags.split(), str(tmp_path / "w")) == []
    assert wandb_rows(tmp_path / "w")[1] == {"train/step": 4, "eval/aime": 0.25}


def test_wandb_names_are_those_of_the_flags_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    flags = "--use-wandb --wandb-mode offline --wandb-project p --wandb-team t --wandb-group g --wandb-dir"

    def logged(place: str) -> Any:
        assert log_late_evaluation(tmp_path, *flags.split(), str(tmp_path / place)) == []
        return next(r.run for r in wandb_records(tmp_path / place) if r.WhichOneof("record_type") == "run")

    run, resumed = logged("a"), logged("b")
    name = f"g_{run.run_id}"
    assert (run.entity, run.project, run.run_group, run.display_name) == ("t", "p", name, name)
    assert resumed.run_id == run.run_id


def test_a_wandb_server_that_hangs_up_never_stops_a_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with listening() as (url, seen):
        flags = ("--use-wandb", "--wandb-mode", "online", "--wandb-host", url, "--wandb-key", KEY)
        assert log_late_evaluation(tmp_path, *flags, WANDB_INIT_TIMEOUT="2") == ["wandb"]
    assert seen
    assert [row.get("step", row.get("eval/step")) for row in read_lines(tmp_path / "metrics.jsonl")] == [5, 4, 6]


def test_trackio_keeps_a_late_evaluation_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    flags = ("--use-trackio", "--trackio-project", "p")
    assert log_late_evaluation(tmp_path / "r", *flags, TRACKIO_DIR=str(tmp_path / "t")) == []
    [database] = (tmp_path / "t").glob("p*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(run, step, json.loads(metrics)) for run, step, metrics in rows] == [
        ("r", 5, {"train/loss": 0.5}),
        ("r", 4, {"eval/aime": 0.25}),
        ("r", 6, {"train/loss": 0.25}),
    ]


def test_a_secret_is_shown_nowhere() -> None:
    settings = settings_of(f"--use-wandb --wandb-key {KEY}")
    assert settings.run.wandb_key == KEY
    assert json.loads(settings.to_json())["run"]["wandb_key"] == "***"
    assert KEY not in repr(settings) + settings.to_json() + explain(settings)


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_package_that_is_not_there_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    problems = Problems()
    check.check(settings_of(f"--use-{package}"), problems)
    assert problems.lines == [
        f"--use-{package}: the package {package} is not installed; pip install 'miles[{package}]' works"
    ]


@pytest.mark.parametrize("name", ["a/b", "..", ".", "/a", "a/"])
@pytest.mark.parametrize("flag", ["--run-name", "--tb-project-name", "--tb-experiment-name"])
def test_names_of_folders_are_names(flag: str, name: str) -> None:
    problems = Problems()
    check.check(settings_of(f"{flag} {name}"), problems)
    [line] = problems.lines
    assert line.startswith(f"{flag} {name}: ")


def test_tensorboard_events_lie_in_the_folders_that_are_named(tmp_path: Path) -> None:
    flags = "--use-tensorboard --tb-project-name p --tb-experiment-name e"
    assert log_late_evaluation(tmp_path, *flags.split()) == []
    assert scalars(tmp_path / "tensorboard" / "p" / "e")["eval/aime"] == [(4, 0.25)]
