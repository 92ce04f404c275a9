r"""A JSONL file in, its rows out: an index of byte offsets stays in memory, a row is parsed when it is asked for.

Lines end at ``\n`` and nowhere else (U+2028, U+2029 and U+0085 stay inside their strings); a BOM at the start and blank
lines at the end are fine. What a row may hold stands in `miles.data.rows`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from miles.data.rows import DEFAULT_KEYS, Row, RowKeys, RowParser, Rows, kind
from miles.errors import DataError

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 24


def read_rows(path: str | Path, keys: RowKeys = DEFAULT_KEYS) -> list[Row]:
    """Every row of a file, parsed."""
    return list(JsonlFile(path, keys))


class JsonlFile(Rows):
    """The rows of a file that does not change while it is open: 8 bytes of index per row."""

    def __init__(self, path: str | Path, keys: RowKeys = DEFAULT_KEYS) -> None:
        self._parser = RowParser(str(path), keys)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (open as long as rows are drawn)
            self._offsets = _line_offsets(self._file.fileno())
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        if not len(self):
            raise DataError(f"{path}: has no rows")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def row(self, i: int) -> Row:
        start, end = int(self._offsets[i]), int(self._offsets[i + 1])
        return self._parse(os.pread(self._file.fileno(), end - start, start), i + 1)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def _parse(self, line: bytes, number: int) -> Row:
        refuse = self._parser.refuse
        if not line.strip():
            refuse(number, "is blank, and rows follow")
        try:
            values = json.loads(line.decode("utf-8"))
            if b"\\u" in line:
                json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError as error:
            refuse(number, f"is no UTF-8 text (byte {error.start} of the line)")
        except UnicodeEncodeError:
            refuse(number, "has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
        except json.JSONDecodeError as error:
            refuse(number, f"is cut off or no JSON ({error.msg}, column {error.colno})")
        if not isinstance(values, dict):
            refuse(number, f"is {kind(values)}, not an object")
        return self._parser.parse(values, number)


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
