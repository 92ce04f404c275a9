"""A Parquet file in, its rows out: a row group is unpacked into a mapped temporary file when its first row is asked for.

Parquet has no cheap access to one row: a row group is compressed as a whole, and writers make them as large as a million
rows. So each is decoded once, batch by batch, into an Arrow file on disk (in the folder that TMPDIR names; it has no name
and goes with the process), and every later row is a look-up in mapped memory. Shuffled draws then cost no decoding, and
neither the file nor a row group is ever held in memory.

Only the columns that rows are made of are read. Nulls inside objects are left out: a column has one type, so a key that
one row lacks is null there. Dates become ISO text. What a row may hold stands in `miles.data.rows`.
"""

from __future__ import annotations

import datetime
import decimal
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.parquet as pq

from miles.data.rows import DEFAULT_KEYS, Row, RowKeys, RowParser
from miles.errors import DataError

_BATCH_ROWS = 8192
_BUFFER_BYTES = 1 << 20


class ParquetFile(Sequence[Row]):
    """The rows of a file that does not change while it is open. Lines in errors are row numbers, from 1."""

    def __init__(self, path: str | Path, keys: RowKeys = DEFAULT_KEYS) -> None:
        try:
            self._file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: can't be read: {error}") from error
        names = self._file.schema_arrow.names
        self._parser = RowParser(str(path), keys, names)
        self._columns = [name for name in names if name in keys.names()]
        groups = (self._file.metadata.row_group(g).num_rows for g in range(self._file.metadata.num_row_groups))
        self._starts = [0, *accumulate(groups)]
        self._unpacked: dict[int, pa.Table] = {}
        if not len(self):
            raise DataError(f"{path}: has no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        group = bisect_right(self._starts, i) - 1
        (values,) = self._group(group, i + 1).slice(i - self._starts[group], 1).to_pylist(maps_as_pydicts="strict")
        try:
            return self._parser.parse({name: _plain(value) for name, value in values.items()}, i + 1)
        except TypeError as error:
            self._parser.refuse(i + 1, str(error))

    def _group(self, group: int, line: int) -> pa.Table:
        if group not in self._unpacked:
            try:
                self._unpacked[group] = self._unpack(group)
            except (OSError, pa.ArrowException) as error:
                self._parser.refuse(line, f"its row group {group} can't be read: {error}")
        return self._unpacked[group]

    def _unpack(self, group: int) -> pa.Table:
        batches = self._file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=self._columns, use_threads=False)
        with tempfile.NamedTemporaryFile(prefix="miles-rows-") as unpacked:
            schema = pa.schema([self._file.schema_arrow.field(name) for name in self._columns])
            with pa.ipc.new_file(pa.PythonFile(unpacked, mode="w"), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            unpacked.flush()
            return pa.ipc.open_file(pa.memory_map(unpacked.name)).read_all()


def _plain(value: Any) -> Any:
    """An Arrow value as JSON would give it. Raises TypeError for what JSON can't hold."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"has a value of type {type(value).__name__}; text, numbers, lists and objects of them work")
