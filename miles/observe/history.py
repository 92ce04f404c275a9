"""A run folder goes in, what happened comes out: series by metric name, events, settings, time and tokens spent."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from miles.observe.metrics import eval_sets
from miles.observe.run_folder import EVAL_STEP, STEP, read_lines, read_metrics


class Series(NamedTuple):
    """One metric over its own axis, oldest step first; without the rows that lack it."""

    steps: list[int]
    values: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True)
class History:
    """Everything that a run folder says: ``train`` and ``evals`` hold one row per step of their axis, in its order."""

    name: str
    train: list[dict[str, float]]
    evals: list[dict[str, float]]
    events: list[dict[str, Any]]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> History:
        """Raises DataError where a file of the folder is damaged before its last line."""
        rows = read_metrics(folder / "metrics.jsonl")
        settings = folder / "settings.json"
        return cls(
            name=folder.name,
            train=_by_axis(rows, STEP),
            evals=_by_axis(rows, EVAL_STEP),
            events=read_lines(folder / "events.jsonl"),
            settings=json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {},
        )

    def series(self, name: str) -> Series:
        """A training metric."""
        return _series(self.train, STEP, name)

    def eval_series(self, name: str) -> Series:
        """An evaluation metric, over the steps that were evaluated."""
        return _series(self.evals, EVAL_STEP, name)

    @property
    def eval_sets(self) -> list[str]:
        return eval_sets({name for row in self.evals for name in row})

    @property
    def steps(self) -> int:
        """Training steps that have ended."""
        return int(self.train[-1][STEP]) if self.train else 0

    @property
    def wall_time_s(self) -> float:
        """Seconds that the run's processes were at it: from each ``started`` event to the last sign before the next."""
        rows: list[dict[str, Any]] = [*self.train, *self.evals, *self.events]
        signs = sorted((float(row["time"]), row.get("kind") == "started") for row in rows)
        return sum(after - before for (before, _), (after, is_start) in pairwise(signs) if not is_start)

    @property
    def trained_tokens(self) -> float:
        return sum(v for v in self.series("rollout/trained_tokens").values if math.isfinite(v))

    @property
    def end(self) -> dict[str, Any] | None:
        """The event ``closed`` of the last process, None while it runs or where it was killed."""
        last = [event for event in self.events if event["kind"] in ("started", "closed")][-1:]
        return last[0] if last and last[0]["kind"] == "closed" else None


def _by_axis(rows: list[dict[str, float]], axis: str) -> list[dict[str, float]]:
    """The last row of each step, in the order of the axis."""
    by_step = {int(row[axis]): row for row in rows if axis in row}
    return [by_step[step] for step in sorted(by_step)]


def _series(rows: list[dict[str, float]], axis: str, name: str) -> Series:
    found = [row for row in rows if name in row]
    return Series([int(row[axis]) for row in found], [row[name] for row in found])
