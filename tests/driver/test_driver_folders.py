"""What the driver finds before anything starts: folders it can't write or would take apart."""

import pytest

from miles.config import Problems
from miles.driver.check import _check_writable
from miles.driver.checkpoints import CheckpointFolder, find_checkpoint
from miles.driver.run import _open_folder
from miles.errors import SettingsError
from miles.observe.run_folder import RunFolder
from tests.virtual import settings_of


def run_with(folder, steps):
    """A run folder with rows and a checkpoint after each step."""
    run = RunFolder(folder)
    run.write_settings("{}")
    for step in range(1, steps + 1):
        run.append_step(step, {"x": 1.0})
        checkpoints = CheckpointFolder(folder / "checkpoints")
        checkpoints.begin(step - 1)
        checkpoints.finish(step - 1, step)
    run.close()


def opened(tmp_path, flags):
    settings = settings_of(f"--run-dir {tmp_path} {flags}")
    folder = _open_folder(settings, find_checkpoint(settings.checkpoint.load))
    folder.close()
    return folder


@pytest.mark.parametrize("load", ["{0}/a", "{0}/a/checkpoints", "{0}/a/checkpoints/step_000002"])
@pytest.mark.parametrize("name", ["", "--run-name a"])
def test_a_resumed_run_goes_on_in_its_own_folder_from_its_checkpoint(tmp_path, load, name):
    run_with(tmp_path / "a", 3)
    folder = opened(tmp_path, f"--load {load.format(tmp_path)} {name}")
    assert folder.path == tmp_path / "a"
    assert folder.last_step == (2 if "000002" in load else 3)


@pytest.mark.parametrize("load", ["", "--load {0}/typo", "--load {0}/a"])
def test_another_runs_folder_is_never_taken_apart(tmp_path, load):
    run_with(tmp_path / "a", 3)
    run_with(tmp_path / "b", 2)
    before = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    with pytest.raises(SettingsError, match=r"--run-name b: .* holds another run"):
        opened(tmp_path, f"--run-name b {load.format(tmp_path)}")
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == before


def test_a_restart_script_may_name_a_folder_that_has_no_checkpoint_yet(tmp_path):
    run = RunFolder(tmp_path / "a")
    run.write_settings("{}")
    run.append_step(1, {"x": 1.0})
    run.close()
    assert opened(tmp_path, f"--run-name a --load {tmp_path}/a").last_step is None


def test_a_damaged_checkpoint_is_named(tmp_path):
    run_with(tmp_path / "a", 1)
    (tmp_path / "a" / "checkpoints" / "step_000001" / "checkpoint.json").write_text('{"step": 1,')
    with pytest.raises(SettingsError, match=r"step_000001.checkpoint\.json is damaged"):
        find_checkpoint(str(tmp_path / "a"))


@pytest.mark.parametrize("flag", ["--run-dir", "--save", "--save-hf", "--update-weight-disk-dir"])
def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path, flag):
    (tmp_path / "file").write_text("")
    problems = Problems()
    _check_writable(settings_of(f"{flag} {tmp_path}/file/below"), problems)
    assert [line.split(":")[0] for line in problems.lines] == [f"{flag} {tmp_path}/file/below"]
    problems = Problems()
    _check_writable(settings_of(f"{flag} {tmp_path}/new/below"), problems)
    assert problems.lines == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_the_folder_of_kept_rollouts_is_tried_too(tmp_path):
    (tmp_path / "file").write_text("")
    problems = Problems()
    _check_writable(settings_of(f"--save-debug-rollout-data {tmp_path}/file/{{rollout_id}}.pt"), problems)
    [line] = problems.lines
    assert line.startswith(f"--save-debug-rollout-data {tmp_path}/file: can't be written")
