"""What no single room knows: folders to start from, and settings that the chosen engine does nothing with."""

import pytest

from miles.config import Problems, Settings
from miles.driver.check import check
from miles.driver.checkpoints import CheckpointFolder, find_checkpoint
from miles.driver.run import steps_to_run


def said(words):
    problems = Problems()
    check(Settings.parse(words.split(), problems), problems)
    return problems


def lines_about(flag, words):
    problems = said(words)
    return [line for line in [*problems.lines, *problems.warnings] if flag in line.split(":")[0]]


@pytest.fixture
def trained(tmp_path):
    """A checkpoints folder after ten steps."""
    folder = CheckpointFolder(tmp_path)
    folder.begin(9)
    folder.finish(9, 11)
    return tmp_path


@pytest.mark.parametrize("total", [3, 10])
def test_a_run_that_its_checkpoint_has_finished_is_refused(trained, total):
    [line] = lines_about("--num-rollout", f"--load {trained} --num-rollout {total}")
    assert line == (
        f"--num-rollout {total}: the checkpoint in --load {trained} has trained 10 steps already; 11 or more works"
    )
    assert lines_about("--num-rollout", f"--load {trained} --num-rollout 11") == []


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--start-rollout-id", -1, "training steps count from 0, and --num-rollout is 20; 0 works"),
        ("--start-rollout-id", 20, "training steps count from 0, and --num-rollout is 20; 0 works"),
        ("--debug-exit-after-rollout", 4, "the run starts with training step 5; 5 or more works"),
    ],
)
def test_a_run_told_to_train_nothing_is_refused(flag, value, why):
    start = "" if flag == "--start-rollout-id" else "--start-rollout-id 5"
    assert lines_about(flag, f"--num-rollout 20 {start} {flag} {value}") == [f"{flag} {value}: {why}"]
    assert lines_about(flag, f"--num-rollout 20 {start} {flag} 5") == []


def test_a_checkpoint_says_where_a_run_goes_on(trained):
    [line] = lines_about("--start-rollout-id", f"--num-rollout 20 --load {trained} --start-rollout-id 5")
    assert f"the checkpoint in --load {trained} goes on at 10" in line
    assert lines_about("--start-rollout-id", f"--num-rollout 20 --load {trained} --start-rollout-id 10") == []
    assert lines_about("--debug-exit", f"--num-rollout 20 --load {trained} --debug-exit-after-rollout 9") != []


def test_steps_are_those_between_start_and_end(trained):
    checkpoint = find_checkpoint(str(trained))
    for words, given, steps in (
        ("", None, range(20)),
        ("--start-rollout-id 5", None, range(5, 20)),
        ("--start-rollout-id 5 --debug-exit-after-rollout 7", None, range(5, 8)),
        ("--debug-exit-after-rollout 30", checkpoint, range(10, 20)),
    ):
        assert steps_to_run(Settings.parse(words.split(), Problems()), given, 20) == steps


def test_checkpoints_of_another_format_get_one_error_that_names_a_way(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    [line] = lines_about("--load", f"--load {tmp_path} --ref-load {tmp_path}")
    assert line.startswith(f"--load {tmp_path} and --ref-load {tmp_path}: ") and "--hf-checkpoint" in line


def test_a_run_that_has_not_begun_may_be_loaded(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "none"):
        starts = f"--load {folder} holds no checkpoint: the run starts from --hf-checkpoint"
        assert lines_about("--load", f"--load {folder}") == [starts]


def test_a_reference_without_a_kl_term_is_idle(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    [line] = lines_about("--ref-load", f"--ref-load {tmp_path}")
    assert "has no effect" in line


KL = "--use-kl-loss --kl-loss-coef 0.1"


@pytest.mark.parametrize(
    "words", [KL, "--kl-coef 0.1 --advantage-estimator reinforce_plus_plus --normalize-advantages"]
)
def test_a_reference_that_is_not_there_is_refused(tmp_path, words):
    (tmp_path / "settings.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "none"):
        [line] = lines_about("--ref-load", f"{words} --ref-load {folder}")
        assert line.startswith(f"--ref-load {folder}: holds no model and no checkpoint") and "works" in line


def test_a_reference_may_be_a_model_or_a_checkpoint(trained, tmp_path):
    assert lines_about("--ref-load", f"{KL} --ref-load {trained}") == []
    (tmp_path / "config.json").write_text("{}")
    assert lines_about("--ref-load", f"{KL} --ref-load {tmp_path}") == []
    assert any("is the model of --hf-checkpoint" in note for note in said(KL).notes)


def test_flags_of_servers_that_the_local_engine_lacks_share_one_line():
    words = "--sglang-mem-fraction-static 0.7 --router-policy cache_aware --sglang-max-running-requests 8"
    assert lines_about("no effect on the local engine", words) == [
        "no effect on the local engine and its router: --sglang-mem-fraction-static, --router-policy"
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--n-samples-per-prompt 1", "--n-samples-per-prompt 1: a sample alone in its group has advantage 0"),
        ("--update-weight-disk-dir d", "--update-weight-disk-dir has no effect without"),
        ("--eval-prompt-data a b", "--eval-prompt-data is given but --eval-interval is not"),
        ("--max-weight-staleness 2", "--max-weight-staleness bounds fully-async training only"),
    ],
)
def test_what_is_overridden_in_silence_elsewhere_is_warned_of(words, line):
    assert any(warning.startswith(line) for warning in said(words).warnings)
