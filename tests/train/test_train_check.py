"""The trainer's settings are refused with the numbers and a value that works, all at once."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import Problems, Settings, effects
from miles.config.owners import ModelSettings, RolloutSettings, SamplingSettings, TrainSettings
from miles.train.check import check


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text("{}")
    return str(path)


def settings(folder, *, batch=32, samples=8, context=None, response=None, **train):
    return Settings(
        model=ModelSettings(hf_checkpoint=folder),
        rollout=RolloutSettings(rollout_batch_size=batch, n_samples_per_prompt=samples),
        sampling=SamplingSettings(rollout_max_context_len=context, rollout_max_response_len=response),
        train=TrainSettings(**train),
    )


def problems_of(given):
    problems = Problems()
    check(given, problems)
    return problems.lines


def test_settings_of_a_usual_script_have_no_problem(folder):
    usual = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9216, "global_batch_size": 256, "use_tis": True}
    assert problems_of(settings(folder, response=8192, actor_num_gpus_per_node=4, **usual)) == []


def test_batch_that_makes_no_optimizer_step_is_refused_with_its_numbers(folder):
    [line] = problems_of(settings(folder, batch=16, samples=8, global_batch_size=256))
    assert line == (
        "--global-batch-size 256: --rollout-batch-size 16 x --n-samples-per-prompt 8 = 128 samples; "
        "// 256 = 0 optimizer steps, 128 samples left over; --global-batch-size 128 works"
    )


def test_samples_that_ranks_cannot_share_are_refused(folder):
    [line] = problems_of(settings(folder, batch=5, samples=3, actor_num_gpus_per_node=4))
    assert "4 trainer ranks can't share 15 samples per optimizer step evenly" in line
    assert line.endswith("--actor-num-gpus-per-node 3 works") or line.endswith("--actor-num-gpus-per-node 5 works")


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"global_batch_size": 64, "num_steps_per_rollout": 2}, ["--num-steps-per-rollout 2", "= 128", "= 256 samples"]),
        ({"num_steps_per_rollout": 3}, ["--num-steps-per-rollout 3", "3 optimizer steps can't share evenly", "2 works"]),
        ({"global_batch_size": 4}, ["--global-batch-size 4", "would split groups of --n-samples-per-prompt 8", "8 works"]),
        ({"use_dynamic_batch_size": True}, ["--use-dynamic-batch-size: needs a token limit", "--max-tokens-per-gpu"]),
        ({"eps_clip_c": 1.0}, ["--eps-clip-c 1.0: must be above 1"]),
        ({"eps_clip": 1.5}, ["--eps-clip 1.5"]),
        ({"use_tis": True, "use_rollout_logprobs": True}, ["--use-tis: ", "--use-rollout-logprobs"]),
        ({"tis_clip": 0.5, "tis_clip_low": 0.7}, ["--tis-clip-low 0.7: must be between 0 and --tis-clip 0.5"]),
        ({"adam_beta1": 1.0}, ["--adam-beta1 1.0"]),
        ({"adam_beta2": -0.1}, ["--adam-beta2 -0.1"]),
        ({"lr": 1e-6, "min_lr": 1e-5}, ["--min-lr 1e-05: must be between 0 and --lr 1e-06"]),
        ({"clip_grad": -1.0}, ["--clip-grad -1.0"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_its_numbers(folder, train, expected):
    [line] = problems_of(settings(folder, **train))
    assert all(part in line for part in expected), line


@pytest.mark.parametrize(
    ("limits", "longest"),
    [({"context": 4097}, 4097), ({"response": 4096}, 4097), ({"context": 5000, "response": 99}, 5000)],
)
def test_micro_batch_smaller_than_one_sample_is_refused(folder, limits, longest):
    [line] = problems_of(settings(folder, max_tokens_per_gpu=4096, **limits))
    assert f"one sample may have {longest} tokens" in line
    assert line.endswith(f"{longest} or more works")


@pytest.mark.parametrize("missing", [None, "no/such/folder", "without-config"])
def test_model_folder_that_is_none_is_refused(tmp_path, missing):
    (tmp_path / "without-config").mkdir()
    path = missing and str(tmp_path / missing)
    [line] = problems_of(settings(path))
    assert line.startswith("--hf-checkpoint")


def test_all_problems_come_at_once():
    lines = problems_of(settings(None, global_batch_size=7, eps_clip_c=0.5, adam_beta1=2.0))
    assert [line.split()[0] for line in lines] == [
        "--hf-checkpoint",
        "--global-batch-size",
        "--adam-beta1",
        "--eps-clip-c",
    ]


ESTIMATORS = next(f for f in fields(TrainSettings) if f.name == "advantage_estimator").metadata["choices"]


def said(given):
    problems = Problems()
    check(given, problems)
    return problems


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_async_run_without_a_choice_says_that_the_engines_log_probs_are_the_denominator(folder, estimator):
    [note] = said(settings(folder, advantage_estimator=estimator)).notes
    assert note.startswith("off-policy correction: the engine's log-probs are the denominator")


@pytest.mark.parametrize("choice", [{"use_tis": True}, {"use_rollout_logprobs": True}])
def test_async_run_with_a_choice_needs_no_word(folder, choice):
    assert said(settings(folder, **choice)).notes == []


def test_sync_run_needs_no_correction(folder):
    assert said(replace(settings(folder), program="train")).notes == []


def test_explicit_choice_that_leaves_async_data_uncorrected_is_refused_with_the_choices(folder):
    given = replace(settings(folder), sources={"use_rollout_logprobs": "flag"})
    [line] = problems_of(given)
    assert line.startswith("--no-use-rollout-logprobs: one_step_off training")
    assert line.endswith("--use-rollout-logprobs or --use-tis works")
    assert problems_of(replace(given, train=TrainSettings(use_tis=True))) == []


def test_several_optimizer_steps_per_batch_say_what_age_they_add(folder):
    [note] = said(settings(folder, num_steps_per_rollout=4, use_tis=True)).notes
    assert note.startswith("4 optimizer steps per batch") and "3 optimizer step(s) older" in note


FIELD_OF = {
    "--" + f.name.replace("_", "-"): f.name for owner in (TrainSettings, RolloutSettings) for f in fields(owner)
}


@given(
    batch=st.integers(1, 12),
    samples=st.integers(1, 6),
    size=st.one_of(st.none(), st.integers(1, 80)),
    steps=st.one_of(st.none(), st.integers(1, 9)),
    ranks=st.integers(1, 5),
)
def test_value_that_is_said_to_work_works(folder, batch, samples, size, steps, ranks):
    given = settings(
        folder,
        batch=batch,
        samples=samples,
        global_batch_size=size,
        num_steps_per_rollout=steps,
        actor_num_gpus_per_node=ranks,
    )
    for line in problems_of(given):
        advice = line.rsplit("; ", 1)[1]
        words = advice.split()
        train, rollout = given.train, given.rollout
        if words[0] == "--rollout-batch-size":
            rollout = replace(rollout, rollout_batch_size=int(words[1]))
            train = replace(train, global_batch_size=None, num_steps_per_rollout=None)
        else:
            train = replace(train, **{FIELD_OF[words[0]]: int(words[1])})
        if "without" in words:
            train = replace(train, **{FIELD_OF[words[words.index("without") + 1]]: None})
        assert problems_of(replace(given, train=train, rollout=rollout)) == [], line


# ---- losses, advantages, KL


def some(argv, folder):
    """Problems and warnings of flags, as they are given."""
    problems = Problems()
    base = f"--hf-checkpoint {folder} --rollout-batch-size 32 --n-samples-per-prompt 8 --use-tis"
    given = Settings.parse([*base.split(), *argv.split()], problems)
    effects.check(given, problems)
    check(given, problems)
    return problems


@pytest.mark.parametrize(("argv", "flag", "said"), [
    ("--loss-type custom_loss", "--custom-loss-function-path", "module.name of a function works"),
    ("--loss-type custom_loss --custom-loss-function-path no.such", "--custom-loss-function-path", "no such module"),
    ("--disable-compute-advantages-and-returns", "--disable-compute-advantages-and-returns", "sft_loss and custom_loss work"),
    ("--advantage-estimator reinforce_plus_plus", "--advantage-estimator", "--normalize-advantages works with it"),
    ("--advantage-estimator reinforce_plus_plus_baseline", "--advantage-estimator", "--normalize-advantages works"),
    ("--advantage-estimator ppo", "--advantage-estimator", "is not here yet; one of grpo"),
    ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2", "--kl-coef", "one of the two at 0 works"),
    ("--kl-coef -1", "--kl-coef", "must not be negative"),
    ("--get-mismatch-metrics", "--get-mismatch-metrics", "--custom-tis-function-path works with it"),
    ("--custom-tis-function-path nothing", "--custom-tis-function-path", "module.function"),
    ("--custom-pg-loss-reducer-function-path os.nothing", "--custom-pg-loss-reducer-function-path", "has no nothing"),
])  # fmt: skip
def test_losses_that_cannot_be_are_refused(folder, argv, flag, said):
    [line] = some(argv, folder).lines
    assert line.startswith(flag) and said in line


@pytest.mark.parametrize(("argv", "said"), [
    ("--use-kl-loss --kl-loss-coef 0.00", "no reference is loaded"),
    ("--kl-loss-coef 0.1", "--kl-loss-coef has no effect without --use-kl-loss"),
    ("--kl-coef 0.1", "--kl-coef has no effect with --advantage-estimator grpo"),
    ("--gamma 0.9", "--gamma has no effect with --advantage-estimator grpo"),
    ("--ref-update-interval 5", "no effect without a KL term: --ref-update-interval"),
    ("--loss-type sft_loss", "no effect with --loss-type sft_loss: --use-tis"),
    ("--custom-loss-function-path os.getcwd", "has no effect with --loss-type policy_loss"),
    ("--no-use-tis --custom-tis-function-path os.getcwd", "has no effect without --use-tis or --get-mismatch-metrics"),
    ("--opsm-delta 0.1", "--opsm-delta has no effect without --use-opsm"),
    ("--tis-clip 3 --custom-tis-function-path os.getcwd", "--tis-clip has no effect beside --custom-tis-function-path"),
])  # fmt: skip
def test_what_a_loss_does_not_read_is_said(folder, argv, said):
    problems = some(argv, folder)
    assert problems.lines == []
    assert any(said in line for line in problems.warnings), problems.warnings


def test_a_likelihood_needs_no_word_about_correction(folder):
    assert said(settings(folder, loss_type="sft_loss")).notes == []
