"""Laws of a mix: exact shares in every epoch, own rows drawn evenly, and a place that names one row for good."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data.mix import Mix, split
from miles.data.prompts import PromptSource
from miles.data.rows import Row, RowKeys
from miles.errors import DataError, SettingsError


def rows_of(name, count):
    return [Row(i + 1, f"{name}{i}", None, {}) for i in range(count)]


def mix_of(sizes, weights, *, shuffle=True, seed=0):
    return Mix([rows_of("abcdefgh"[i], n) for i, n in enumerate(sizes)], weights, shuffle=shuffle, seed=seed)


def source_of(sizes, weights, *, shuffle=True, seed=0):
    return PromptSource(mix_of(sizes, weights, shuffle=shuffle, seed=seed), shuffle=shuffle, seed=seed)


def drawn(source, count):
    return [prompt.prompt for prompt in source.take(count)]


def test_without_weights_an_epoch_is_every_row_of_every_file_once():
    source = source_of([3, 5], None)
    assert source.rows == 8
    for _ in range(2):
        assert sorted(drawn(source, 8)) == ["a0", "a1", "a2", "b0", "b1", "b2", "b3", "b4"]
    assert drawn(source_of([2, 2], None, shuffle=False), 5) == ["a0", "a1", "b0", "b1", "a0"]


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.2, 5)), min_size=1, max_size=5), st.integers(0, 3))
def test_shares_are_exact_in_every_epoch_and_own_rows_take_turns(parts, seed):
    sizes, weights = [n for n, _ in parts], [w for _, w in parts]
    try:
        source = source_of(sizes, weights, seed=seed)
    except DataError:
        return
    total, seen = sum(sizes), Counter()
    for _ in range(3):
        epoch = Counter(drawn(source, total))
        for name, weight in zip("abcde", weights, strict=False):
            count = sum(n for prompt, n in epoch.items() if prompt[0] == name)
            assert abs(count - total * weight / sum(weights)) < 1
        seen += epoch
    for name, size in zip("abcde", sizes, strict=False):
        times = [seen[f"{name}{i}"] for i in range(size)]
        assert max(times) - min(times) <= 1


def test_an_epoch_goes_on_through_the_rows_where_the_last_one_stopped():
    source = source_of([2, 8], [1, 1])
    first, second = drawn(source, 10), drawn(source, 10)
    assert Counter(p[0] for p in first) == {"a": 5, "b": 5}
    large = [p for p in first + second if p[0] == "b"]
    assert len(set(large)) == 8


def test_without_shuffle_shares_are_spread_evenly():
    assert drawn(source_of([4, 12], [3, 1], shuffle=False), 8) == ["a0", "a1", "b0", "a2", "a3", "a0", "b1", "a1"]


def test_a_place_names_one_row_whoever_asks():
    sizes, weights = [7, 5, 20], [0.5, 0.3, 0.2]
    first, again = source_of(sizes, weights, seed=4), source_of(sizes, weights, seed=4)
    prompts = first.take(100)
    assert [again.prompt(p.id).prompt for p in reversed(prompts)] == [p.prompt for p in reversed(prompts)]
    assert drawn(source_of(sizes, weights, seed=5), 100) != [p.prompt for p in prompts]


def test_a_resumed_mix_goes_on_where_it_was():
    sizes, weights = [7, 5, 20], [0.5, 0.3, 0.2]
    source, resumed = source_of(sizes, weights), source_of(sizes, weights)
    source.take(45)
    resumed.load_state_dict(source.state_dict())
    assert drawn(resumed, 30) == drawn(source, 30)


@pytest.mark.parametrize("other", [([12, 20], [1, 1]), ([16, 16], [1, 2]), ([16, 16], None)])
def test_a_state_of_another_mix_is_refused(other):
    state = source_of([16, 16], [1, 1]).state_dict()
    source_of([16, 16], [2, 2]).load_state_dict(state)
    with pytest.raises(SettingsError, match="--prompt-data: parts is"):
        source_of(*other).load_state_dict(state)


def test_a_state_of_another_slice_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "x"}\n' * 20)
    first, second = (PromptSource.open([f"{path}@[{a}:{a + 5}]"], RowKeys(), shuffle=True, seed=0) for a in (0, 5))
    with pytest.raises(SettingsError, match="--prompt-data: parts is"):
        second.load_state_dict(first.state_dict())


def test_split_gives_largest_remainders_and_no_weight_nothing():
    assert split(10, [1, 1, 1]) == [4, 3, 3]
    assert split(100, [0.3, 0.7]) == [30, 70]
    with pytest.raises(DataError, match=r"\*0.001 of 1.001 is 0.01 of the 10 draws of an epoch, which is none; \*0.1"):
        split(10, [1, 0.001])
