"""Words of ``--prompt-data`` in, the rows that each one names out.

    word      where [ "@[" a ":" b "]" ] [ "*" weight ]
    where     PATH.jsonl | PATH.json | PATH.parquet | reasoning_gym:TASK,TASK... [ "@" key=value,... ]

``@[a:b]`` is Python's slice of the rows: either end may be left out or negative. ``*weight`` is the word's share of the
draws, beside the weights of the others (`miles.data.mix`). Keys of reasoning-gym tasks are ``size`` (problems of each
task, 500), ``seed`` (0) and whatever the tasks' own configurations have.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from miles.data import gym
from miles.data.jsonl import JsonlFile
from miles.data.parquet import ParquetFile
from miles.data.rows import Row, RowKeys
from miles.errors import DataError

_FORMATS = {".jsonl": JsonlFile, ".json": JsonlFile, ".parquet": ParquetFile}
_WORD = re.compile(r"(?P<where>.+?)(?:@\[(?P<slice>[^\]]*)\])?(?:\*(?P<weight>[^*/@\]]+))?", re.DOTALL)


class WordError(DataError):
    """A word that names no rows; ``works`` is what would."""

    def __init__(self, why: str, works: str = "a .jsonl or .parquet file works") -> None:
        super().__init__(f"{why}; {works}")
        self.why = why
        self.works = works


@dataclass(frozen=True)
class Word:
    """One word, taken apart. ``weight`` None: it has none."""

    where: str
    rows: slice
    weight: float | None

    @classmethod
    def parse(cls, text: str) -> Word:
        """Raises WordError where slice or weight can't be read."""
        match = _WORD.fullmatch(text)
        if match is None:
            raise WordError("names nothing")
        return cls(match["where"], _slice(match["slice"]), _weight(match["weight"]))

    @property
    def is_generated(self) -> bool:
        """Its rows are made when they are drawn, which may take long: there is no file to be checked."""
        return self.where.startswith(gym.PREFIX)

    def open(self, keys: RowKeys) -> Sequence[Row]:
        """The rows. Raises DataError where there are none, or they can't be read."""
        rows = _gym_tasks(self.where) if self.is_generated else _file(self.where, keys)
        if self.rows == slice(None):
            return rows
        part = range(*self.rows.indices(len(rows)))
        if not part:
            raise WordError(f"{_shown(self.rows)} has none of the {len(rows)} rows", f"@[0:{len(rows)}] works")
        return RowRange(rows, part)


class RowRange(Sequence[Row]):
    """Some rows of others, still under their own line numbers."""

    def __init__(self, rows: Sequence[Row], part: range) -> None:
        self._rows = rows
        self._part = part

    @property
    def first(self) -> int:
        return self._part.start

    def __len__(self) -> int:
        return len(self._part)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowRange: ...
    def __getitem__(self, index: int | slice) -> Row | RowRange:
        if isinstance(index, slice):
            return RowRange(self._rows, self._part[index])
        return self._rows[self._part[index]]


class RowChain(Sequence[Row]):
    """Several sequences of rows, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowRange: ...
    def __getitem__(self, index: int | slice) -> Row | RowRange:
        if isinstance(index, slice):
            return RowRange(self, range(len(self))[index])
        i = range(len(self))[index]
        part = bisect_right(self._starts, i) - 1
        return self._parts[part][i - self._starts[part]]


def _file(path: str, keys: RowKeys) -> Sequence[Row]:
    format = _FORMATS.get(Path(path).suffix)
    if format is None:
        raise WordError(f"files of type {Path(path).suffix or 'unknown'} can't be read")
    if not Path(path).is_file():
        raise WordError("there is no such file")
    return format(path, keys)


def _gym_tasks(where: str) -> Sequence[Row]:
    names, _, options = where.removeprefix(gym.PREFIX).partition("@")
    config: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise WordError(f"{option} is no key=value", f"{gym.PREFIX}leg_counting@size=500,seed=3 works")
        config[key] = _value(value)
    return RowChain([gym.GymTask(name, config) for name in names.split(",")])


def _value(text: str) -> Any:
    """A number, true or false; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _slice(text: str | None) -> slice:
    if text is None:
        return slice(None)
    match = re.fullmatch(r"(-?\d+)?:(-?\d+)?", text)
    if match is None:
        raise WordError(f"@[{text}] is no slice of rows", "@[0:1000], @[1000:] and @[:-500] work")
    return slice(*(None if end is None else int(end) for end in match.groups()))


def _weight(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise WordError(f"*{text} is no weight", "a number above 0 works, as in *0.3")
    return weight


def _shown(rows: slice) -> str:
    return "@[" + ":".join("" if end is None else str(end) for end in (rows.start, rows.stop)) + "]"
