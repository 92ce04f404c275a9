"""Laws of drawing: every row once per epoch, in an order that follows from (seed, epoch), and nothing lost on resume."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data.cursor import epoch_order
from miles.data.prompts import PromptSource
from miles.data.rows import Row
from miles.errors import SettingsError


def source(rows, *, shuffle=True, seed=0):
    return PromptSource([Row(i + 1, f"p{i}", None, {}) for i in range(rows)], shuffle=shuffle, seed=seed)


def drawn(prompts):
    return [(p.epoch, p.row) for p in prompts]


def test_more_than_an_epoch_is_given_in_full():
    """THUDM/slime#2365: three rows, eight wanted."""
    prompts = source(3)
    assert len(prompts.take(8)) == 8
    assert (prompts.epoch, prompts.offset) == (2, 2)


def test_epoch_ends_with_the_draw_after_its_last_row():
    prompts = source(3)
    assert (prompts.epoch, prompts.offset) == (0, 0)
    prompts.take(3)
    assert (prompts.epoch, prompts.offset) == (0, 3)
    prompts.next_prompt()
    assert (prompts.epoch, prompts.offset) == (1, 1)


def test_each_crossed_epoch_is_shuffled_once():
    epoch_order.cache_clear()
    source(3).take(8)
    assert epoch_order.cache_info().misses == 3


def test_no_rows_is_an_error_and_no_loop():
    with pytest.raises(ValueError, match="no rows"):
        source(0)


def test_training_goes_on_past_the_end_of_an_epoch():
    """NVIDIA-NeMo/RL#2899: four prompts, batches of two, five steps."""
    prompts = source(4)
    steps = [prompts.take(2) for _ in range(5)]
    counts = Counter(p.row for step in steps[:4] for p in step)
    assert counts == Counter({row: 2 for row in range(4)})


def test_file_order_without_shuffle():
    assert [p.row for p in source(3, shuffle=False).take(7)] == [0, 1, 2, 0, 1, 2, 0]


@given(rows=st.integers(1, 50), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 5))
def test_every_epoch_is_a_permutation(rows, seed, epoch):
    assert sorted(epoch_order(rows, seed, epoch)) == list(range(rows))


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    orders = {(seed, epoch): tuple(epoch_order(64, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16
    epoch_order.cache_clear()
    assert all(tuple(epoch_order(64, *key)) == order for key, order in orders.items())


def test_order_is_the_same_on_every_machine():
    assert list(epoch_order(8, 42, 0)) == [0, 1, 4, 2, 6, 5, 7, 3]


def test_given_back_prompts_come_first_and_in_order():
    prompts = source(5)
    first = prompts.take(4)
    prompts.give_back([first[3], first[1]])
    prompts.give_back([first[0]])
    assert prompts.take(3) == [first[0], first[3], first[1]]
    assert prompts.next_prompt().id == 4


def test_only_prompts_that_are_out_can_be_given_back():
    prompts, other = source(5), source(5)
    first = prompts.next_prompt()
    prompts.give_back([first])
    with pytest.raises(ValueError, match="draw 0 is not out"):
        prompts.give_back([first])
    with pytest.raises(ValueError, match="draw 1 is not out"):
        prompts.give_back(other.take(2)[1:])


def test_id_names_the_prompt_for_good():
    prompts, restarted = source(7), source(7)
    assert [restarted.prompt(p.id) for p in prompts.take(20)] == source(7).take(20)


@given(st.lists(st.one_of(st.integers(1, 7), st.just("give back"), st.just("restart")), max_size=20))
def test_no_prompt_is_skipped_or_repeated_whatever_happens(actions):
    prompts, out = source(5, seed=3), []
    for action in actions:
        if action == "restart":
            state = prompts.state_dict()
            prompts = source(5, seed=3)
            prompts.load_state_dict(state)
        elif action == "give back":
            prompts.give_back(out[-2:])
            out = out[:-2]
        else:
            out += prompts.take(action)
    waiting = prompts.state_dict()["given_back"]
    assert sorted([p.id for p in out] + waiting) == list(range(prompts.state_dict()["drawn"]))
    assert len(set(drawn(out))) == len(out)


@pytest.mark.parametrize(("change", "flag"), [
    ({"rows": 6}, "--prompt-data: rows is 6 now and was 5"),
    ({"seed": 1}, "--rollout-seed: seed is 1 now and was 0"),
    ({"shuffle": False}, "--rollout-shuffle: shuffle is False now and was True"),
])  # fmt: skip
def test_state_of_other_draws_is_refused(change, flag):
    state = source(5).state_dict()
    with pytest.raises(SettingsError, match=flag):
        source(**{"rows": 5} | change).load_state_dict(state)


def test_draws_of_a_file_share_nothing_mutable(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": [{"role": "user", "content": "hi"}], "metadata": {"turns": []}}\n')
    first, second = PromptSource.from_file(path).take(2)
    first.metadata["turns"].append(1)
    first.prompt[0]["content"] = "changed"
    assert second.metadata == {"turns": []}
    assert second.prompt == [{"role": "user", "content": "hi"}]
