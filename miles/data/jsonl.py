r"""A JSONL file in, its rows out: an index of byte offsets stays in memory, a row is parsed when it is asked for.

Lines end at ``\n`` and nowhere else (U+2028, U+2029 and U+0085 stay inside their strings); a BOM at the start and blank
lines at the end are fine. Whatever can't be used is a `DataError` that starts with ``file:line``.

What a row may hold:

- the prompt: text, or a list of chat messages, each an object with a "role"; not empty;
- the label, where a label key is set: text, or a number, which becomes its decimal text (5 becomes "5", 0.50 becomes
  "0.5"). Anything else (missing, null, "", true, a list, an object, NaN) is an error, because no answer could ever
  match it and its reward would silently be 0;
- metadata: an object; missing or null means an empty one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np

from miles.errors import DataError
from miles.types import Message

CHECKED_ROWS = 50_000
"""Rows that are read when a run starts; those after them are read when they are drawn."""

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class RowKeys:
    """Under which keys a row holds what; ``label`` None: rows have no label."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"


@dataclass(frozen=True)
class Row:
    """One usable row. ``line`` counts from 1."""

    line: int
    prompt: str | list[Message]
    label: str | None
    metadata: dict[str, Any]


def read_rows(path: str | Path, keys: RowKeys = RowKeys()) -> list[Row]:
    """Every row of a file, parsed."""
    return list(JsonlFile(path, keys))


class JsonlFile(Sequence[Row]):
    """The rows of a file that does not change while it is open: 8 bytes of index per row."""

    def __init__(self, path: str | Path, keys: RowKeys = RowKeys()) -> None:
        self.path = Path(path)
        self.keys = keys
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115  (open as long as rows are drawn)
            self._offsets = _line_offsets(self._file.fileno())
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        if not len(self):
            raise DataError(f"{path}: has no rows")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        start, end = int(self._offsets[i]), int(self._offsets[i + 1])
        return self._parse(os.pread(self._file.fileno(), end - start, start), i + 1)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def check(self) -> None:
        """Parses the first rows and the last one (a download that broke off is cut there). Raises DataError."""
        for i in range(min(len(self), CHECKED_ROWS)):
            self[i]
        self[len(self) - 1]

    def _parse(self, line: bytes, number: int) -> Row:
        if not line.strip():
            self._refuse(number, "is blank, and rows follow")
        try:
            values = json.loads(line.decode("utf-8"))
            if b"\\u" in line:
                json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError as error:
            self._refuse(number, f"is no UTF-8 text (byte {error.start} of the line)")
        except UnicodeEncodeError:
            self._refuse(number, "has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
        except json.JSONDecodeError as error:
            self._refuse(number, f"is cut off or no JSON ({error.msg}, column {error.colno})")
        if not isinstance(values, dict):
            self._refuse(number, f"is {_kind(values)}, not an object")
        return Row(
            line=number,
            prompt=self._prompt(values, number),
            label=self._label(values, number),
            metadata=self._metadata(values, number),
        )

    def _prompt(self, values: dict[str, Any], number: int) -> str | list[Message]:
        key = self.keys.input
        if key not in values:
            self._refuse(number, f'has no prompt key "{key}"; its keys are {_names(values)} (--input-key)')
        prompt = values[key]
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, list) and prompt:
            if all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt):
                return prompt
            self._refuse(number, f'prompt "{key}" is a list of something other than messages with a "role"')
        what = "is empty" if prompt in ("", []) else f"is {_kind(prompt)}"
        self._refuse(number, f'prompt "{key}" {what}; text or a list of messages works')

    def _label(self, values: dict[str, Any], number: int) -> str | None:
        key = self.keys.label
        if key is None:
            return None
        if key not in values:
            self._refuse(number, f'has no label key "{key}"; its keys are {_names(values)} (--label-key)')
        label = values[key]
        if isinstance(label, str) and label.strip():
            return label
        if isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label):
            return str(label)
        what = "is empty" if isinstance(label, str) else f"is {_kind(label)}"
        self._refuse(number, f'label "{key}" {what}; text or a finite number works, other objects go into metadata')

    def _metadata(self, values: dict[str, Any], number: int) -> dict[str, Any]:
        metadata = values.get(self.keys.metadata)
        if metadata is None:
            return {}
        if not isinstance(metadata, dict):
            self._refuse(number, f'metadata "{self.keys.metadata}" is {_kind(metadata)}, not an object')
        return metadata

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise DataError(f"{self.path}:{number}: {why}")


def _line_offsets(fd: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each line starts, and where the last one ends, without a BOM at the start and blank lines at the end."""
    newlines, position, text_end = [], 0, 0
    while chunk := os.pread(fd, _CHUNK_BYTES, position):
        newlines.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + position)
        if used := len(chunk.rstrip()):
            text_end = position + used
        position += len(chunk)
    start = len(_BOM) if os.pread(fd, len(_BOM), 0) == _BOM else 0
    if text_end <= start:
        return np.zeros(1, dtype=np.int64)
    inner = np.concatenate(newlines)
    return np.concatenate([[start], inner[inner < text_end] + 1, [text_end]]).astype(np.int64)


def _names(values: dict[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in values) or "none"


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | int):
        return "a number" if math.isfinite(value) else "no finite number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"
