"""Checkpoint folders: what is found is complete."""

import pytest

from miles.driver.checkpoints import CheckpointFolder, find_checkpoint


def save(folder, step, version=1):
    checkpoints = CheckpointFolder(folder)
    checkpoints.begin(step)
    checkpoints.finish(step, version)


@pytest.mark.parametrize("way", ["", "checkpoints", "checkpoints/step_000010"])
def test_load_takes_a_run_a_checkpoints_folder_or_one_step(tmp_path, way):
    save(tmp_path / "checkpoints", 9, version=7)
    found = find_checkpoint(str(tmp_path / way))
    assert (found.step, found.version) == (10, 7)
    assert found.folder == str(tmp_path / "checkpoints" / "step_000010")


def test_a_checkpoint_that_is_still_written_is_not_found(tmp_path):
    """K7: step 10 is complete, step 20 is not."""
    save(tmp_path, 9)
    CheckpointFolder(tmp_path).begin(19)
    assert find_checkpoint(str(tmp_path)).step == 10


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_folder_without_a_checkpoint_starts_from_the_beginning(tmp_path, what):
    if what == "empty":
        (tmp_path / what).mkdir()
    assert find_checkpoint(str(tmp_path / what)) is None
    assert find_checkpoint(None) is None


def test_the_same_step_again_replaces_the_old_one(tmp_path):
    save(tmp_path, 9, version=3)
    save(tmp_path, 9, version=4)
    assert find_checkpoint(str(tmp_path)).version == 4


@pytest.mark.parametrize("latest", [None, "step_000099"])
def test_the_newest_complete_step_is_found_without_latest(tmp_path, latest):
    for step in (9, 19):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    if latest:
        (tmp_path / "latest").write_text(latest)
    assert find_checkpoint(str(tmp_path)).step == 20


def steps_in(folder):
    return sorted(int(f.name.removeprefix("step_")) for f in folder.glob("step_*[0-9]"))


@pytest.mark.parametrize("last, every, stay", [(None, None, [2, 4, 6, 8, 10]), (2, None, [8, 10]), (1, 4, [4, 8, 10])])
def test_older_checkpoints_go_and_every_kth_stays(tmp_path, last, every, stay):
    checkpoints = CheckpointFolder(tmp_path, keep_last=last, keep_every=every)
    for step in (1, 3, 5, 7, 9):
        checkpoints.begin(step)
        checkpoints.finish(step, 1)
    assert steps_in(tmp_path) == stay
    assert find_checkpoint(str(tmp_path)).step == 10


def test_a_run_that_went_back_keeps_what_it_writes_now(tmp_path):
    """Later steps of an abandoned lineage don't push out the newest checkpoint."""
    for step in (19, 29):
        save(tmp_path, step)
    checkpoints = CheckpointFolder(tmp_path, keep_last=1)
    checkpoints.begin(9)
    checkpoints.finish(9, 1)
    assert find_checkpoint(str(tmp_path)).step == 10


def test_the_sentinel_asks_once(tmp_path):
    sentinel = tmp_path / "save_now"
    checkpoints = CheckpointFolder(tmp_path, sentinel=sentinel)
    assert not checkpoints.asked_for()
    sentinel.touch()
    assert checkpoints.asked_for()
    assert not checkpoints.asked_for() and not sentinel.exists()


def test_a_checkpoint_says_what_its_run_was_told(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, about={"settings": {"train": {"lr": 0.1}}, "code_version": "1+a"})
    checkpoints.begin(9)
    checkpoints.finish(9, 1)
    assert find_checkpoint(str(tmp_path)).about["code_version"] == "1+a"
