"""Laws of long prompts: measured as they are sent, passed over when drawn, counted, and never a loop."""

import json

import pytest

from miles.data.limit import PromptLimit
from miles.data.prompts import PromptSource
from miles.data.render import PromptEncoder
from miles.data.rows import Row
from miles.errors import DataError
from tests.data.test_render import tokenizer

TOOL = {"name": "a"}
TEMPLATED = PromptEncoder(tokenizer(), apply_chat_template=True)
PLAIN = PromptEncoder(tokenizer())


def row(text, line=1, **metadata):
    return Row(line, text, None, metadata, "rows.jsonl")


def source_of(lengths, tokens, **more):
    """Rows of so many words (a BOS is added), of which those of ``tokens`` tokens fit."""
    rows = [row("a " * count, line) for line, count in enumerate(lengths, start=1)]
    limit = PromptLimit(PLAIN, tokens, "--rollout-max-prompt-len")
    return PromptSource(rows, **{"shuffle": False, "seed": 0, "limit": limit} | more)


def test_a_prompt_that_fits_without_its_tools_is_too_long_with_them():
    """D2: verl#2069: 2106 tokens are sent where 2048 were measured."""
    sent = TEMPLATED.encode("a b", [TOOL])
    without = TEMPLATED.encode("a b")
    assert len(without) < len(sent)
    limit = PromptLimit(TEMPLATED, len(without), "--rollout-max-prompt-len")
    assert limit.refusal(row("a b")) is None
    said = limit.refusal(row("a b", 7, tools=[TOOL]))
    assert said == f"rows.jsonl:7 has {len(sent)} tokens with 1 tools, --rollout-max-prompt-len is {len(without)}"
    assert PromptLimit(TEMPLATED, len(sent), "").refusal(row("a b", tools=[TOOL])) is None


def test_special_tokens_count():
    assert PromptLimit(PLAIN, 3, "").refusal(row("a b")) is None
    assert "3 tokens" in PromptLimit(PLAIN, 2, "").refusal(row("a b"))


def test_messages_that_only_a_hook_can_render_are_not_measured():
    assert PromptLimit(PLAIN, 1, "").refusal(row([{"role": "user", "content": "a a a"}])) is None


def test_long_rows_are_passed_over_and_counted():
    source = source_of([1, 5, 2, 9], 3)
    assert source.skipped == 0
    assert [p.row for p in source.take(4)] == [0, 2, 0, 2]
    assert (source.skipped, source.epoch, source.offset) == (3, 1, 3)
    assert source.first_skipped == "rows.jsonl:2 has 6 tokens, --rollout-max-prompt-len is 3"


def test_epochs_count_rows_that_are_passed_over():
    source, unlimited = source_of([1, 5, 2, 9], 3), source_of([1, 5, 2, 9], 99)
    assert source.rows == unlimited.rows == 4
    source.take(3), unlimited.take(5)
    assert (source.epoch, source.offset) == (unlimited.epoch, unlimited.offset) == (1, 1)


def test_where_no_row_fits_there_is_an_error_and_no_loop():
    source = source_of([5, 6, 7], 3)
    with pytest.raises(DataError, match=r"no prompt fits: not one in an epoch of 3 draws; rows.jsonl:2 has 7 tokens"):
        source.next_prompt()


def test_one_row_that_fits_is_enough_forever():
    source = source_of([5, 1, 7], 3, shuffle=True)
    assert {p.row for p in source.take(50)} == {1}


def test_a_resumed_source_passes_over_the_same_rows():
    source, resumed = source_of([1, 5, 2, 9, 3], 3, shuffle=True), source_of([1, 5, 2, 9, 3], 3, shuffle=True)
    source.take(4)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.take(9) == source.take(9)
