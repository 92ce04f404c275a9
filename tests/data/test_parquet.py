"""Laws of Parquet files: the rows that JSONL would give, row group by row group, and errors that name file and row."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles.data.jsonl import JsonlFile
from miles.data.parquet import ParquetFile
from miles.data.rows import RowKeys, check_rows
from miles.errors import DataError

KEYS = RowKeys("prompt", "label")


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, **options):
        path = tmp_path / "rows.parquet"
        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path, **options)
        return path

    return write_rows


def texts(count):
    return [{"prompt": f"p{i}", "label": i} for i in range(count)]


def test_rows_are_those_of_the_same_jsonl(write, tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [
        {"prompt": [{"role": "user", "content": "a\u2028b 😀"}], "label": "1", "metadata": {"k": 1}, "tools": [tool]},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}], "label": "2"},
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [(r.prompt, r.label, r.metadata) for r in JsonlFile(lines, KEYS)]
    assert [(r.prompt, r.label, r.metadata) for r in ParquetFile(write(rows), KEYS)] == expected
    assert expected[0][2] == {"k": 1, "tools": [tool]}


@pytest.mark.parametrize("group", [1, 3, 7, 100])
def test_every_row_is_found_in_its_row_group(write, group):
    file = ParquetFile(write(texts(20), row_group_size=group), KEYS)
    assert [r.prompt for r in reversed(file)] == [f"p{i}" for i in reversed(range(20))]
    assert [(r.line, r.label) for r in file[18:]] == [(19, "18"), (20, "19")]
    assert file[-1].prompt == "p19"


def test_only_row_groups_that_are_drawn_from_are_unpacked_and_only_once(write, monkeypatch):
    file = ParquetFile(write(texts(20), row_group_size=5), KEYS)
    read = []
    monkeypatch.setattr(file, "_unpack", lambda group, unpack=file._unpack: read.append(group) or unpack(group))
    assert len(list(file)) == len(file) == 20 and read == []
    assert [file[i].label for i in (12, 3, 14, 0)] == ["12", "3", "14", "0"]
    assert read == [2, 0]


def test_other_columns_are_not_read(write):
    (row,) = ParquetFile(write([{"prompt": "p", "label": "1", "image": b"\xff\xd8"}]), KEYS)
    assert (row.prompt, row.metadata) == ("p", {})


def test_columns_of_one_type_hold_metadata_and_tools_as_json_text(write):
    (row,) = ParquetFile(
        write([{"prompt": "p", "label": "1", "metadata": '{"k": 1}', "tools": '[{"name": "t"}]'}]), KEYS
    )
    assert row.metadata == {"k": 1, "tools": [{"name": "t"}]}


def test_nulls_of_columns_are_left_out_and_dates_become_text(write):
    day = datetime.date(2026, 1, 2)
    rows = [{"prompt": "a", "label": "1", "metadata": {"rm_type": "math", "day": day}}, {"prompt": "b", "label": "2"}]
    rows[1]["metadata"] = {"day": day}
    assert [r.metadata for r in ParquetFile(write(rows), KEYS)] == [
        {"rm_type": "math", "day": "2026-01-02"},
        {"day": "2026-01-02"},
    ]


@pytest.mark.parametrize(("row", "said"), [
    ({"question": "x", "answer": 1}, ':1: has no prompt key "prompt"; its keys are "question", "answer"'),
    ({"prompt": "x", "answer": 1}, ':1: has no label key "label"; its keys are "prompt", "answer"'),
    ({"prompt": "", "label": "1"}, ':1: prompt "prompt" is empty'),
    ({"prompt": "x", "label": None}, ':1: label "label" is null'),
    ({"prompt": "x", "label": b"1"}, ":1: has a value of type bytes"),
    ({"prompt": "x", "label": "1", "metadata": [1]}, ':1: metadata "metadata" is a list, not an object'),
])  # fmt: skip
def test_unusable_rows_are_refused_with_file_and_row(write, row, said):
    with pytest.raises(DataError, match=r"rows\.parquet" + said):
        ParquetFile(write([row]), KEYS)[0]
    with pytest.raises(DataError, match=r"rows\.parquet" + said):
        check_rows(ParquetFile(write([row]), KEYS))


def test_a_bad_row_is_named_by_its_number_in_the_file(write):
    file = ParquetFile(write([*texts(9), {"prompt": None, "label": 1}], row_group_size=4), KEYS)
    with pytest.raises(DataError, match=r'rows\.parquet:10: prompt "prompt" is null'):
        file[9]


def test_what_is_no_parquet_or_empty_or_cut_off_is_named(write, tmp_path):
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet at all")
    with pytest.raises(DataError, match=r"broken\.parquet: can't be read"):
        ParquetFile(broken, KEYS)
    with pytest.raises(DataError, match=r"rows\.parquet: has no rows"):
        ParquetFile(write(pa.table({"prompt": pa.array([], pa.string())})), KEYS)
    path = write(
        [{"prompt": "x" * 50 + str(i), "label": i} for i in range(500)], compression="NONE", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.parquet: row group 0 \(row 7\) can't be read"):
        ParquetFile(path, KEYS)[6]
