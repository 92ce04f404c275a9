"""Flags in, settings out; every problem at once."""

import json

import pytest

from miles.config import Problems, Settings
from miles.errors import SettingsError
from miles.utils.arguments import parse_args
from tests.virtual import settings_of


def problems_of(argv):
    problems = Problems()
    Settings.parse(argv.split(), problems)
    return problems.lines


def test_a_flag_without_its_value_is_told():
    [line] = problems_of("--lr-decay-style")
    assert line.startswith("--lr-decay-style: expected one argument; ")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--fuly-async", "--fuly-async: no such flag; did you mean --fully-async?"),
        ("--lr 0", "--lr 0: must be above 0; for example 1e-06 works"),
        ("--n-samples-per-prompt x", "--n-samples-per-prompt x: is not an integer; for example 1 works"),
        (
            "--pause-generation-mode stop",
            "--pause-generation-mode stop: is none of the choices; one of abort, retract, in_place works",
        ),
        ("stray --lr 1", "stray: stands alone, no flag takes it; give it after its flag"),
    ],
)
def test_a_value_that_cannot_work_names_flag_value_and_a_way_out(argv, line):
    assert problems_of(argv) == [line]


def test_a_run_reports_them_all():
    problems = Problems()
    Settings.parse(["--fuly-async", "--lr", "0", "--seed", "y"], problems)
    with pytest.raises(SettingsError) as error:
        problems.raise_all()
    assert str(error.value).startswith("3 problems in the settings:")
    assert len(error.value.problems) == 3


def test_flags_are_given_by_name_or_abbreviation_and_remembered():
    settings = settings_of("--rollout-batch 8 --n-samples-per-prompt=4 --disable-grpo-std-normalization")
    assert settings.rollout.rollout_batch_size == 8
    assert not settings.train.grpo_std_normalization
    assert settings.given == {"rollout_batch_size", "n_samples_per_prompt", "grpo_std_normalization"}


@pytest.mark.parametrize(
    ("flags", "program", "mode"),
    [
        ("", "train", "sync"),
        ("", "train_async", "one_step_off"),
        ("--fully-async", "train_async", "fully_async"),
        (
            "--rollout-function-path miles.rollout.fully_async_rollout.generate_rollout_fully_async",
            "train_async",
            "fully_async",
        ),
        ("--rollout-function-path fully_async_rollout.generate_rollout_fully_async", "train_async", "fully_async"),
        ("--rollout-function-path miles.rollout.fully_async_rollout.FullyAsyncRolloutFn", "train_async", "fully_async"),
        ("--rollout-function-path my.own", "train", "function"),
    ],
)
def test_program_and_selectors_give_the_mode(flags, program, mode):
    assert settings_of(flags, program).mode == mode


def test_the_first_era_path_retries_unused_groups_unless_told_otherwise():
    path = "--rollout-function-path miles.rollout.fully_async_rollout.generate_rollout_fully_async"
    assert settings_of(path).retry_unused
    assert not settings_of(path + " --async-unused-samples-handler drop").retry_unused
    assert not settings_of("--fully-async").retry_unused


def test_sizes_are_derived():
    settings = settings_of("--rollout-batch-size 32 --n-samples-per-prompt 4 --global-batch-size 32")
    assert (settings.batch_samples, settings.optimizer_steps, settings.samples_per_optimizer_step) == (128, 4, 32)
    assert (settings.slots, settings.buffer_groups) == (128, 64)


def test_what_evaluation_leaves_unset_is_as_in_training():
    settings = settings_of(
        "--rollout-temperature 0.7 --rollout-top-p 0.9 --eval-temperature 0 --rollout-max-response-len 8"
    )
    params = settings.eval_sampling_params()
    assert (params["temperature"], params["top_p"], params["max_new_tokens"]) == (0.0, 0.9, 8)


def test_hooks_get_a_flat_namespace_with_resolved_names():
    args = settings_of("--eps-clip 0.1 --reward-key score --rollout-batch-size 2").namespace(sglang_router_port=5)
    assert (args.eps_clip_high, args.eval_reward_key, args.sglang_router_port, args.rollout_batch_size) == (
        0.1,
        "score",
        5,
        2,
    )
    assert Settings.from_namespace(args).rollout.rollout_batch_size == 2


def test_hooks_see_one_word_of_prompt_data_as_text_and_several_as_they_are():
    one, two = settings_of("--prompt-data a.jsonl"), settings_of("--prompt-data a.jsonl b.parquet*2")
    assert one.namespace().prompt_data == "a.jsonl" and settings_of("").namespace().prompt_data is None
    assert two.namespace().prompt_data == ("a.jsonl", "b.parquet*2")
    for settings in (one, two, settings_of("")):
        assert Settings.from_namespace(settings.namespace()).data.prompt_data == settings.data.prompt_data


def test_the_context_bounds_prompts_unless_told_otherwise():
    assert settings_of("").max_prompt_len is None
    assert settings_of("--rollout-max-context-len 64").max_prompt_len == 63
    assert settings_of("--rollout-max-context-len 64 --rollout-max-prompt-len 20").max_prompt_len == 20


def test_the_run_folder_gets_settings_as_json():
    values = json.loads(settings_of("--eval-prompt-data a b --lr 1e-3").to_json())
    assert values["train"]["lr"] == 1e-3
    assert values["given"] == ["eval_prompt_data", "lr"]


def test_one_evaluation_path_alone_is_named_aime():
    [dataset] = settings_of("--eval-prompt-data p.jsonl").eval_datasets
    assert (dataset.name, dataset.path) == ("aime", "p.jsonl")


def test_the_first_era_door_refuses_what_is_not_here():
    assert parse_args(["--lr", "1e-3", "--sequence-parallel"]).lr == 1e-3
    with pytest.raises(SettingsError, match=r"--colocate: is not here yet"):
        parse_args(["--colocate"])
