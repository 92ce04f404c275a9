"""Rows to groups of fresh samples, and a state that loses none of them."""

import json

import pytest

from miles.data.jsonl import Row
from miles.data.prompts import PromptSource
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.data_source import eval_sets as sets_of
from tests.virtual import settings_of


def source_of(rows=3, size=2):
    made = [Row(i + 1, [{"role": "user", "content": str(i)}], str(i), {"k": i}) for i in range(rows)]
    return RolloutDataSourceWithBuffer(PromptSource(made, shuffle=False, seed=0), size)


def labels(groups):
    return [g[0].label for g in groups]


def test_samples_are_numbered_on_over_epochs():
    """D1: three rows, eight asked for: eight come."""
    groups = source_of().get_samples(8)
    assert labels(groups) == ["0", "1", "2", "0", "1", "2", "0", "1"]
    assert [[s.index for s in g] for g in groups] == [[2 * i, 2 * i + 1] for i in range(8)]
    assert [g[0].group_index for g in groups] == list(range(8))


def test_samples_of_a_group_share_nothing_mutable():
    first, second = source_of().get_samples(1)[0]
    first.metadata["k"], first.prompt[0]["content"] = "changed", "changed"
    assert (second.metadata["k"], second.prompt[0]["content"]) == (0, "0")
    assert labels(source_of().get_samples(1)) == ["0"]


def test_groups_given_back_come_first_and_must_be_whole():
    source = source_of()
    first, second = source.get_samples(2)
    source.add_samples([second, first])
    assert source.get_buffer_length() == 2
    assert labels(source.get_samples(3)) == ["1", "0", "2"]
    with pytest.raises(ValueError, match="a group of 1 samples"):
        source.add_samples([first[:1]])


def test_a_resumed_source_issues_open_prompts_first_and_skips_none():
    """K1, K2: what was drawn and not trained comes again; then the rows go on where they were."""
    source = source_of(rows=6)
    groups = source.get_samples(4)
    for sample in groups[2]:
        sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
    state = json.loads(json.dumps(source.state(open_prompts=groups[2:])))
    resumed = source_of(rows=6)
    resumed.load_state(state)
    again = resumed.get_samples(5)
    assert labels(again) == ["2", "3", "4", "5", "0"]
    assert [g[0].group_index for g in again] == [2, 3, 4, 5, 6]
    assert again[0][0].tokens == [] and again[0][0].reward is None


def test_evaluation_samples_never_share_an_index_with_training(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"q": "a", "y": "1"}\n{"q": "b", "y": "2"}\n')
    flags = (
        f"--eval-prompt-data one {path} two {path} --eval-input-key q --eval-label-key y --n-samples-per-eval-prompt 3"
    )
    sets = sets_of(settings_of(flags))
    indices = [s.index for e in sets for g in e.groups for s in g]
    assert [e.name for e in sets] == ["one", "two"]
    assert len(set(indices)) == 12 and max(indices) < 0
    assert [g[0].label for g in sets[0].groups] == ["1", "2"]
