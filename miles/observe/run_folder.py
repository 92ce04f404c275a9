"""Settings, metrics and events go in; a folder that outlives the run and any kill comes out, one JSON object per line.

`metrics.jsonl` holds two kinds of row: training steps (key ``step``, strictly increasing) and evaluations (key
``eval/step``, an axis of their own, in any order). Every row has ``time``, in seconds since 1970.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from miles.errors import DataError, SettingsError

STEP, EVAL_STEP = "step", "eval/step"


class JsonLines:
    """Appends objects to a file, each line in one write: a kill leaves at most one half line, cut off on the next open.

    With ``lock``, raises SettingsError where another process has the file open; the lock ends with the process.
    """

    def __init__(self, path: Path, *, lock: bool = False) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if lock:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise SettingsError(
                [f"{path.parent}: another run is writing there; wait for its end, or another --run-name works"]
            ) from None
        os.ftruncate(self._fd, _end_of_last_line(path))

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one line; NaN and infinity become null. Raises OSError where the disk takes no more."""
        line = orjson.dumps(row, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        if os.write(self._fd, line) != len(line):
            raise OSError(f"{self._path}: a line of {len(line)} bytes was cut off; is the disk full?")

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none if there is no file. A half line at the end is left out.

    Raises DataError, with file and line, where a whole line is no object.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a JSON object is expected, this is {type(row).__name__}")
        rows.append(row)
    return rows


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of `metrics.jsonl`, as written; null comes back as NaN. Raises DataError like `read_lines`."""
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in read_lines(path)]


class RunFolder:
    """One run's folder, opened (and made, where missing) to be written by one process.

    Raises SettingsError where another process writes it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        path.mkdir(parents=True, exist_ok=True)
        self.used = (path / "settings.json").exists()
        self._events = JsonLines(path / "events.jsonl", lock=True)
        self._metrics = JsonLines(path / "metrics.jsonl")
        self.last_step = _last_step(self.metrics_path)

    @classmethod
    def open(cls, run_dir: Path, run_name: str | None, clock: Callable[[], float] = time.time) -> RunFolder:
        """``run_dir/run_name``, or a new folder named after date and time (with a number, where a second is shared)."""
        if run_name is not None:
            return cls(run_dir / run_name, clock)
        run_dir.mkdir(parents=True, exist_ok=True)
        stem = datetime.fromtimestamp(clock()).strftime("%Y-%m-%d_%H-%M-%S")
        name, again = stem, 1
        while True:
            try:
                (run_dir / name).mkdir()
            except FileExistsError:
                again += 1
                name = f"{stem}_{again}"
            else:
                return cls(run_dir / name, clock)

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def name(self) -> str:
        return self.path.name

    def write_settings(self, text: str) -> None:
        """Replaces `settings.json` in one step."""
        part = self.path / "settings.json.tmp"
        part.write_text(text, encoding="utf-8")
        part.replace(self.path / "settings.json")

    def append_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Records a training step. The axis never goes back: a step that isn't later than the last becomes an event
        ``late_step`` that keeps its metrics, and False is returned."""
        if self.last_step is not None and step <= self.last_step:
            self.append_event("late_step", step=step, last_step=self.last_step, metrics=dict(metrics))
            return False
        self._metrics.append({STEP: step, "time": self._clock(), **metrics})
        self.last_step = step
        return True

    def append_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the policy after training step ``step``, whenever it ends."""
        self._metrics.append({EVAL_STEP: step, "time": self._clock(), **metrics})

    def append_event(self, kind: str, **fields: Any) -> None:
        """Records what happened beside the steps: ``kind`` names it, ``fields`` are JSON values (else their text)."""
        self._events.append({"time": self._clock(), "kind": kind, **fields})

    def go_back_to(self, step: int) -> None:
        """Sets aside the rows after training step ``step``, so that a run resumed there can write them again.

        They move to `metrics.abandoned.jsonl`, and an event ``went_back`` counts them.
        """
        rows = read_lines(self.metrics_path)
        late = [row for row in rows if _axis_step(row) > step]
        if not late:
            return
        abandoned = JsonLines(self.path / "metrics.abandoned.jsonl")
        for row in late:
            abandoned.append(row)
        abandoned.close()
        self._metrics.close()
        part = self.path / "metrics.jsonl.tmp"
        kept = [orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows if _axis_step(row) <= step]
        part.write_bytes(b"".join(kept))
        part.replace(self.metrics_path)
        self._metrics = JsonLines(self.metrics_path)
        self.last_step = _last_step(self.metrics_path)
        self.append_event("went_back", step=step, abandoned_rows=len(late))

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def _axis_step(row: Mapping[str, Any]) -> int:
    return int(row[STEP] if STEP in row else row[EVAL_STEP])


def _last_step(path: Path) -> int | None:
    return max((int(row[STEP]) for row in read_lines(path) if STEP in row), default=None)


def _end_of_last_line(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
