"""Laws of the words of --prompt-data: Python's slices, rows under their own lines, generated tasks."""

import builtins
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data import words
from miles.data.rows import Row, RowKeys
from miles.data.words import RowChain, Word, WordError
from miles.errors import DataError

ENDS = st.one_of(st.none(), st.integers(-15, 15))


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"input": "p{i}"}}\n' for i in range(10)))
    return file


def prompts_of(word):
    return [row.prompt for row in Word.parse(str(word)).open(RowKeys())]


@given(start=ENDS, end=ENDS)
def test_slices_are_those_of_python(start, end):
    rows = [Row(i + 1, f"p{i}", None, {}) for i in range(10)]
    text = "@[" + ":".join("" if e is None else str(e) for e in (start, end)) + "]"
    word = Word.parse("rows.jsonl" + text)
    expected = rows[start:end]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_file", lambda path, keys: rows)
        if expected:
            assert list(word.open(RowKeys())) == expected
        else:
            with pytest.raises(WordError, match="has none of the 10 rows"):
                word.open(RowKeys())


def test_rows_of_a_slice_keep_their_lines(path):
    part = Word.parse(f"{path}@[7:]").open(RowKeys())
    assert [row.place for row in part] == [f"{path}:{line}" for line in (8, 9, 10)]
    assert [row.line for row in part[1:]] == [9, 10]


@pytest.mark.parametrize(("text", "where", "rows", "weight"), [
    ("a.jsonl", "a.jsonl", slice(None), None),
    ("a@b.jsonl@[1:2]", "a@b.jsonl", slice(1, 2), None),
    ("a.jsonl@[:-1]*0.3", "a.jsonl", slice(None, -1), 0.3),
    ("a.parquet*2", "a.parquet", slice(None), 2.0),
    ("reasoning_gym:a,b@size=5@[1:]*1e-2", "reasoning_gym:a,b@size=5", slice(1, None), 0.01),
])  # fmt: skip
def test_a_word_is_taken_apart(text, where, rows, weight):
    assert Word.parse(text) == Word(where, rows, weight)


@pytest.mark.parametrize(
    "text", ["", "a.jsonl@[1:2:3]", "a.jsonl@[a:b]", "a.jsonl@[]", "a.jsonl*0", "a.jsonl*-1", "a*inf"]
)
def test_words_that_can_not_be_read_say_what_works(text):
    with pytest.raises(WordError, match="work"):
        Word.parse(text)


def test_a_chain_is_its_parts_in_order():
    rows = [Row(i, str(i), None, {}) for i in range(6)]
    chain = RowChain([rows[:1], rows[1:4], rows[4:]])
    assert list(chain) == rows
    assert list(chain[2:5]) == rows[2:5] and chain[-1] == rows[-1]


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without_gym(name, *more):
        if name.startswith("reasoning_gym"):
            raise ModuleNotFoundError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_gym)
    with pytest.raises(DataError, match="reasoning-gym is not installed; pip install reasoning-gym works"):
        prompts_of("reasoning_gym:leg_counting")


@pytest.mark.slow
def test_gym_problems_follow_from_seed_and_size_and_can_be_scored_again():
    gym = pytest.importorskip("reasoning_gym")
    word = "reasoning_gym:leg_counting,basic_arithmetic@size=4,seed=3,max_terms=2"
    with pytest.raises(DataError, match=r"reasoning_gym:leg_counting: .*max_terms"):
        prompts_of(word)
    word = "reasoning_gym:leg_counting,basic_arithmetic@size=4,seed=3"
    assert prompts_of(word) == prompts_of(word) != prompts_of(word.replace("seed=3", "seed=4"))
    assert prompts_of(word + "@[3:5]") == prompts_of(word)[3:5]
    rows = list(Word.parse(word).open(RowKeys(label="answer")))
    assert [row.place for row in rows[3:5]] == ["reasoning_gym:leg_counting:4", "reasoning_gym:basic_arithmetic:1"]
    for row in rows:
        assert row.metadata["rm_type"] == "reasoning_gym"
        problem = json.loads(json.dumps(row.metadata["reasoning_gym"]))
        task = gym.create_dataset(problem["task"], **problem["config"])
        assert task.score_answer(row.label, task[problem["index"]]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("word", "said"), [
    ("leg_countin", "reasoning_gym:leg_countin: there is no such task; did you mean leg_counting"),
    ("leg_counting@size=0", "size=0 is no number of problems"),
    ("leg_counting@size", "size is no key=value; reasoning_gym:leg_counting@size=500,seed=3 works"),
    ("leg_counting@min_animals=9,max_animals=2", "reasoning_gym:leg_counting: max_animals must be"),
])  # fmt: skip
def test_gym_words_that_can_not_work_are_named(word, said):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=said):
        prompts_of("reasoning_gym:" + word)
