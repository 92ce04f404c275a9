"""Rows to groups of fresh samples, and a state that loses none of them."""

import json

import pytest

from miles.data.prompts import PromptSource
from miles.data.rows import Row
from miles.errors import DataError, HookError
from miles.hooks import function_registry
from miles.rollout.data_source import (
    DataSource,
    NumberedSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    fresh_samples,
    make_data_source,
    pop_first,
    resume,
    saved_state,
    skipped_rows,
)
from miles.rollout.data_source import eval_sets as sets_of
from miles.types import Sample
from tests.real_engine import MODEL
from tests.virtual import settings_of, simulate


def source_of(rows=3, size=2, *, flags="", cls=RolloutDataSourceWithBuffer, **more):
    made = [Row(i + 1, [{"role": "user", "content": str(i)}], str(i), {"k": [i]}) for i in range(rows)]
    args = settings_of(f"--n-samples-per-prompt {size} {flags}").namespace(**more)
    return cls(args, PromptSource(made, shuffle=False, seed=0))


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
    first.metadata["k"][0], first.prompt[0]["content"] = "changed", "changed"
    assert (second.metadata["k"], second.prompt[0]["content"]) == ([0], "0")
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


def test_fresh_samples_count():
    prompt = source_of().dataset.next_prompt()
    assert len(fresh_samples(prompt, 0, 0, 5)) == 5


# ---- the contract's forms


@pytest.fixture
def rows(tmp_path):
    """Quickstart prompts of 2, 5 and 8 digits."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in ("12=", "12345=", "12345678=")))
    return path


def test_a_shipped_source_is_made_from_args_alone(rows):
    args = settings_of(f"--prompt-data {rows} --n-samples-per-prompt 2").namespace()
    for path in (
        "miles.rollout.data_source.RolloutDataSource",
        "miles.rollout.data_source.RolloutDataSourceWithBuffer",
    ):
        source = make_data_source(args, path)
        assert [g[0].prompt for g in source.get_samples(4)] == ["12=", "12345=", "12345678=", "12="]
        assert len(source.dataset) == 3


def test_prompts_over_the_limit_are_never_sampled(rows):
    flags = f"--prompt-data {rows} --hf-checkpoint {MODEL} "
    source = make_data_source(
        settings_of(flags + "--rollout-max-prompt-len 6").namespace(), "miles.rollout.data_source.RolloutDataSource"
    )
    assert {g[0].prompt for g in source.get_samples(10)} == {"12=", "12345="}
    skipped, first = skipped_rows(source)
    assert skipped == 4 and first.startswith(f"{rows}:3 has 9 tokens, --rollout-max-prompt-len is 6")


def test_the_context_leaves_a_token_for_the_response(rows):
    args = settings_of(f"--prompt-data {rows} --hf-checkpoint {MODEL} --rollout-max-context-len 9").namespace()
    assert args.rollout_max_prompt_len == 8
    source = RolloutDataSource(args)
    assert {g[0].prompt for g in source.get_samples(4)} == {"12=", "12345="}
    assert skipped_rows(source)[0] == 1


def test_evaluation_leaves_long_rows_out_and_says_so(rows):
    flags = f"--eval-prompt-data x {rows} --hf-checkpoint {MODEL} "
    (given,) = sets_of(settings_of(flags + "--eval-max-prompt-len 6"))
    assert [g[0].prompt for g in given.groups] == ["12=", "12345="] and len(given.skipped) == 1
    (as_in_training,) = sets_of(settings_of(flags + "--rollout-max-prompt-len 3"))
    assert [g[0].prompt for g in as_in_training.groups] == ["12="]
    with pytest.raises(
        DataError, match=r"--eval-prompt-data x .*rows.jsonl: all 3 rows are too long; .*:1 has 3 tokens"
    ):
        sets_of(settings_of(flags + "--eval-max-prompt-len 2"))


def test_without_a_global_dataset_samples_start_empty_and_numbered():
    args = settings_of("--disable-rollout-global-dataset --n-samples-per-prompt 2").namespace()
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    assert [[(s.index, s.prompt, s.label) for s in g] for g in groups] == [
        [(0, "", None), (1, "", None)], [(2, "", None), (3, "", None)],
    ]  # fmt: skip
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state(json.loads(json.dumps(source.state(groups[1:]))))
    assert [g[0].index for g in resumed.get_samples(2)] == [2, 4]


def test_a_source_without_buffer_takes_no_groups_back():
    source = source_of(cls=RolloutDataSource)
    with pytest.raises(RuntimeError, match="RolloutDataSource takes no groups back"):
        source.add_samples(source.get_samples(1))
    assert source.get_buffer_length() == 0


def last_of_buffer(args, rollout_id, buffer, num_samples):
    assert rollout_id is None and args.buffer_filter_path
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def test_the_buffer_filter_picks_from_what_was_given_back():
    with function_registry.temporary("own.filter", last_of_buffer):
        source = source_of(rows=4, flags="--buffer-filter-path own.filter")
    first, second = source.get_samples(2)
    source.add_samples([first, second])
    assert labels(source.get_samples(1)) == ["1"]
    assert labels(source.get_samples(3)) == ["0", "2", "3"]


@pytest.mark.parametrize(("function", "said"), [
    (lambda args, rollout_id, buffer, num: buffer, "own.filter picked 2 groups where 1 were wanted"),
    (lambda args, rollout_id, buffer, num: 1 / 0, "own.filter failed on a buffer of 2 groups: ZeroDivisionError"),
])  # fmt: skip
def test_a_buffer_filter_that_fails_is_named(function, said):
    with function_registry.temporary("own.filter", function):
        source = source_of(rows=4, flags="--buffer-filter-path own.filter")
    source.add_samples(source.get_samples(2))
    with pytest.raises(HookError, match=said):
        source.get_samples(1)


def test_pop_first_takes_the_oldest_out():
    buffer = [["a"], ["b"], ["c"]]
    assert (pop_first(None, None, buffer, 2), buffer) == ([["a"], ["b"]], [["c"]])


def test_save_and_load_of_the_contract_keep_the_position(tmp_path):
    source, resumed = (source_of(rows=6, save=str(tmp_path), load=str(tmp_path)) for _ in range(2))
    source.add_samples(source.get_samples(2)[1:])
    source.save(7)
    resumed.load(7)
    assert labels(resumed.get_samples(3)) == labels(source.get_samples(3)) == ["1", "2", "3"]


def test_load_without_anything_saved_starts_over_and_says_so(tmp_path, caplog):
    source = source_of(load=str(tmp_path))
    source.load(3)
    assert "prompts are drawn from the first one on" in caplog.text
    assert labels(source.get_samples(1)) == ["0"]
    with pytest.raises(ValueError, match="--save is not set"):
        source.save(0)


# ---- a source of the user's


class OwnSource(DataSource):
    """As users write it: made from args, with a position of its own that it saves itself."""

    def __init__(self, args):
        self.size, self.position, self.saved, self.back = args.n_samples_per_prompt, 0, {}, []

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            self.position += 1
            groups.append([Sample(prompt=f"own {self.position}") for _ in range(self.size)])
        return groups

    def add_samples(self, samples):
        self.back += samples

    def save(self, rollout_id):
        self.saved[rollout_id] = self.position

    def load(self, rollout_id=None):
        self.position = self.saved[rollout_id]


def test_a_source_of_the_user_s_feeds_a_whole_run():
    with function_registry.temporary("own.Source", OwnSource):
        flags = (
            "--data-source-path own.Source --rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 3 "
            "--rollout-max-response-len 16"
        )
        source = make_data_source(settings_of(flags).namespace(), "own.Source")
    source.issued = 0
    sim = simulate(flags, source=source)
    samples = [s for b in sim.trainer.batches for g in b.groups for s in g.samples]
    assert len(samples) == 12 and all(s.prompt.startswith("own ") for s in samples)
    assert len({s.index for s in samples}) == 12, "samples without an index would all get one seed"


def test_a_user_s_source_keeps_its_own_state_and_gets_open_prompts_back():
    args = settings_of("--n-samples-per-prompt 2").namespace()
    source = OwnSource(args)
    first, second = source.get_samples(2)
    state = json.loads(json.dumps(saved_state(source, 5, [second])))
    source.get_samples(4)
    resume(source, state)
    assert source.position == 2
    assert [[s.prompt for s in g] for g in source.back] == [["own 2", "own 2"]]
    assert first[0].prompt == "own 1"


def test_a_subclass_that_only_draws_in_its_own_way_is_saved_like_ours():
    class Reversed(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples):
            return super().get_samples(num_samples)[::-1]

    source, resumed = source_of(rows=6, cls=Reversed), source_of(rows=6, cls=Reversed)
    groups = source.get_samples(2)
    resume(resumed, json.loads(json.dumps(saved_state(source, 0, groups[:1]))))
    assert labels(resumed.get_samples(2)) == ["2", "1"]


def drawing(*groups, error=None):
    class Drawing(DataSource):
        def get_samples(self, num_samples):
            if error:
                raise error
            return list(groups)

    return NumberedSource(Drawing(), "own.Source", 2)


@pytest.mark.parametrize(("source", "said"), [
    (drawing(), r"own.Source: get_samples\(1\) gave groups of \[\] samples; 1 of --n-samples-per-prompt 2 are needed"),
    (drawing([Sample()]), r"gave groups of \[1\] samples"),
    (drawing(error=KeyError("x")), r"own.Source failed on draw 0: KeyError: 'x' \(.*test_data_source.py:\d+\)"),
])  # fmt: skip
def test_a_source_that_fails_is_named(source, said):
    with pytest.raises(HookError, match=said):
        source.get_samples(1)


def test_a_source_that_can_not_be_made_is_named():
    with (
        function_registry.temporary("own.Source", lambda args: 1 / 0),
        pytest.raises(HookError, match=r"own\.Source failed"),
    ):
        make_data_source(settings_of("").namespace(), "own.Source")
