"""A Parquet file in, its rows out: a row group is unpacked into a mapped temporary file when its first row is drawn.

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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles.data.rows import DEFAULT_KEYS, Row, RowKeys, RowParser, Rows
from miles.errors import DataError

_BATCH_ROWS = 8192
_BUFFER_BYTES = 1 << 20


class ParquetFile(Rows):
    """The rows of a file that does not change while it is open. Lines in errors are row numbers, from 1."""

    def __init__(self, path: str | Path, keys: RowKeys = DEFAULT_KEYS) -> None:
        self._path = str(path)
        with self._refusing(""):
            self._file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        names = self._file.schema_arrow.names
        self._parser = RowParser(self._path, keys, names)
        self._columns = [name for name in names if name in keys.names()]
        footer = self._file.metadata
        self._starts = [0, *accumulate(int(footer.row_group(g).num_rows) for g in range(footer.num_row_groups))]
        self._unpacked: dict[int, pa.Table] = {}
        if not len(self):
            raise DataError(f"{path}: has no rows")

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, i: int) -> Row:
        group = bisect_right(self._starts, i) - 1
        if group not in self._unpacked:
            with self._refusing(f"row group {group} (row {i + 1}) "):
                self._unpacked[group] = self._unpack(group)
        (row,) = self._rows(self._unpacked[group].slice(i - self._starts[group], 1), i)
        return row

    def __iter__(self) -> Iterator[Row]:
        """All rows in their order, as a stream: nothing is unpacked."""
        first = 0
        with self._refusing("a row group "):
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=self._columns, use_threads=False):
                yield from self._rows(batch, first)
                first += batch.num_rows

    def _rows(self, values: pa.Table | pa.RecordBatch, first: int) -> Iterator[Row]:
        """Rows of the file from ``first`` (from 0) on."""
        for line, row in enumerate(values.to_pylist(maps_as_pydicts="strict"), start=first + 1):
            try:
                plain = {name: _plain(value) for name, value in row.items()}
            except TypeError as error:
                self._parser.refuse(line, str(error))
            yield self._parser.parse(plain, line)

    def _unpack(self, group: int) -> pa.Table:
        batches = self._file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=self._columns, use_threads=False)
        schema = pa.schema([self._file.schema_arrow.field(name) for name in self._columns])
        with tempfile.NamedTemporaryFile(prefix="miles-rows-") as unpacked:
            with pa.ipc.new_file(pa.PythonFile(unpacked, mode="w"), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            unpacked.flush()
            return pa.ipc.open_file(pa.memory_map(unpacked.name)).read_all()

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Failures to read the file, or to write the unpacked one, become DataErrors."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path}: {what}can't be read: {error}") from error


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
