"""Laws of reading rows: lines end at \\n only, and nothing unusable gets past the file and line that it stands in."""

import json

import numpy as np
import pytest

from miles.data import jsonl, rows
from miles.data.jsonl import JsonlFile, read_rows
from miles.data.rows import RowKeys, check_rows
from miles.errors import DataError

KEYS = RowKeys("prompt", "label")


@pytest.fixture
def write(tmp_path):
    def write_bytes(content):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_bytes


def row(**values):
    return json.dumps({"prompt": "1+1=", "label": "2"} | values, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r", "😀"])
def test_only_a_newline_ends_a_row(write, separator):
    text = f"a{separator}b"
    read = read_rows(write(row(prompt=text) + row()), KEYS)
    assert [r.prompt for r in read] == [text, "1+1="]
    assert [r.line for r in read] == [1, 2]


def test_bom_crlf_and_blank_lines_at_the_end_are_fine(write):
    content = b"\xef\xbb\xbf" + (row() + row(label="3")).replace("\n", "\r\n").encode() + b"\r\n \n\n"
    assert [r.label for r in read_rows(write(content), KEYS)] == ["2", "3"]


def test_last_row_needs_no_newline(write):
    assert len(read_rows(write(row() + row().rstrip()), KEYS)) == 2


def test_lines_across_read_chunks_stay_whole(write, monkeypatch):
    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 7)
    read = read_rows(write("".join(row(label=i) for i in range(20)) + "\n\n"), KEYS)
    assert [r.label for r in read] == [str(i) for i in range(20)]


def test_rows_are_parsed_when_drawn(write):
    file = JsonlFile(write(row() + "{broken\n" + row(label="3")), KEYS)
    assert (len(file), file[0].label, file[-1].label) == (3, "2", "3")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: is cut off or no JSON"):
        file[1]


def test_index_holds_eight_bytes_per_row(write):
    file = JsonlFile(write(row() * 1000), KEYS)
    assert file._offsets.dtype == np.int64
    assert len(file._offsets) == 1001


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (row() + row()[:-9], ':2: is cut off or no JSON'),
        (row() + "\n" + row(), ":2: is blank, and rows follow"),
        ("[1, 2]\n", ":1: is a list, not an object"),
        ('{"question": "x", "answer": 1}\n', ':1: has no prompt key "prompt"; its keys are "question", "answer"'),
        ('{"prompt": "x", "answer": 1}\n', ':1: has no label key "label"; its keys are "prompt", "answer"'),
        (row(prompt=""), ':1: prompt "prompt" is empty'),
        (row(prompt=[]), ':1: prompt "prompt" is empty'),
        (row(prompt=None), ':1: prompt "prompt" is null'),
        (row(prompt=7), ':1: prompt "prompt" is a number'),
        (row(prompt=["hi"]), ':1: prompt "prompt", message 1 is no object with a "role"'),
        (row(prompt=[{"content": "hi"}]), ':1: prompt "prompt", message 1 is no object with a "role"'),
        (row(label=None), ':1: label "label" is null'),
        (row(label=""), ':1: label "label" is empty'),
        (row(label=" \n"), ':1: label "label" is empty'),
        (row(label=["2"]), ':1: label "label" is a list'),
        (row(label={"value": 2}), ':1: label "label" is an object'),
        (row(label=True), ':1: label "label" is true'),
        (row(label=float("nan")), ':1: label "label" is no finite number'),
        (row(metadata=[1]), ':1: metadata "metadata" is a list, not an object'),
        (row() + '{"prompt": "\\ud800", "label": "2"}\n', ":2: has half of a surrogate pair"),
        (row().encode() + b'{"prompt": "\xff", "label": "2"}\n', r":2: is no UTF-8 text \(byte 12 of the line\)"),
        ("", ": has no rows"),
        ("\ufeff\n \n", ": has no rows"),
    ],
)  # fmt: skip
def test_unusable_rows_are_refused_with_file_and_line(write, content, said):
    with pytest.raises(DataError, match=r"rows\.jsonl" + said):
        read_rows(write(content), KEYS)


@pytest.mark.parametrize(
    ("label", "text"), [(5, "5"), (-3, "-3"), (0, "0"), (0.50, "0.5"), (10**30, str(10**30)), (" 7 ", " 7 ")]
)
def test_numbers_become_their_decimal_text(write, label, text):
    assert read_rows(write(row(label=label)), KEYS)[0].label == text


def test_without_a_label_key_rows_have_no_label(write):
    assert read_rows(write(row(label=None)), RowKeys("prompt"))[0].label is None


def test_missing_and_null_metadata_are_empty(write):
    read = read_rows(write(row() + row(metadata=None) + row(metadata={"rm_type": "math"})), KEYS)
    assert [r.metadata for r in read] == [{}, {}, {"rm_type": "math"}]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: can't be read: No such file"):
        JsonlFile(tmp_path / "none.jsonl", KEYS)


def test_check_reads_the_first_rows_and_the_last(write, monkeypatch):
    monkeypatch.setattr(rows, "CHECKED_ROWS", 2)
    check_rows(JsonlFile(write(row() * 2 + "{late\n" + row()), KEYS))
    for content in (row() + "{early\n" + row() * 2, row() * 5 + row()[:-5]):
        with pytest.raises(DataError):
            check_rows(JsonlFile(write(content), KEYS))
