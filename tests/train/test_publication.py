"""Published weights are complete before they are named, and what somebody reads is never written."""

import pytest
import torch

from miles.errors import TrainerError
from tests.train.tiny import load64, make_batch, make_settings, save_model, weights_of


def test_segment_holds_the_state_dict_once_in_the_compute_type(launch, model, tmp_path):
    trainer = launch(make_settings(model, dtype="bfloat16"))
    found = weights_of(trainer, tmp_path / "weights")
    expected = {n: t for n, t in load64(model).state_dict().items() if n != "lm_head.weight"}
    assert list(found) == list(expected)
    assert all(torch.equal(found[n], t.float().bfloat16()) for n, t in expected.items())


def test_busy_segment_is_never_written(launch, model, tmp_path):
    trainer = launch(make_settings(model))
    folder = tmp_path / "weights"
    first = trainer.write_weights(1, str(folder), frozenset(), "shm")
    bytes_of_first = (folder / "segment-0.bin").read_bytes()
    trainer.train(make_batch(), 0)
    second = trainer.write_weights(2, str(folder), frozenset({first.path}), "shm")
    assert (first.path, second.path) == (str(folder / "segment-0.bin"), str(folder / "segment-1.bin"))
    assert (second.version, second.kind) == (2, "shm")
    assert (folder / "segment-0.bin").read_bytes() == bytes_of_first
    third = trainer.write_weights(3, str(folder), frozenset({second.path}), "shm")
    assert third.path == first.path
    assert (folder / "segment-0.bin").read_bytes() == (folder / "segment-1.bin").read_bytes() != bytes_of_first


def test_segment_of_another_model_in_the_folder_is_made_anew(launch, model, tmp_path):
    folder = tmp_path / "weights"
    smaller = weights_of(launch(make_settings(model)), folder)
    untied = save_model(tmp_path / "untied", tied=False)
    found = weights_of(launch(make_settings(untied)), folder)
    assert "lm_head.weight" in found and "lm_head.weight" not in smaller
    assert torch.equal(found["lm_head.weight"], load64(untied).lm_head.weight.float())


def test_full_memory_is_an_error_with_the_numbers_and_leaves_nothing(launch, model, tmp_path, monkeypatch):
    def full(path, nbytes):
        path.write_bytes(b"")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles.train.segments.create_segment", full)
    trainer = launch(make_settings(model))
    with pytest.raises(TrainerError, match=r"segment-0\.bin: it needs \d+ bytes and \d+ are free"):
        trainer.write_weights(1, str(tmp_path / "weights"), frozenset(), "shm")
    assert not list((tmp_path / "weights").glob("*.bin"))


def test_folder_that_cannot_be_made_is_an_error_with_its_path(launch, model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match=r"can't write weights to .*file/segment-0\.bin"):
        launch(make_settings(model)).write_weights(1, str(tmp_path / "file"), frozenset(), "shm")


def test_disk_versions_are_complete_folders_and_idle_ones_are_removed(launch, model, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = launch(make_settings(model))
    folder = tmp_path / "weights"
    paths = [trainer.write_weights(1, str(folder), frozenset(), "disk").path]
    for version in (2, 3):
        paths.append(trainer.write_weights(version, str(folder), frozenset(paths[:1]), "disk").path)
    assert sorted(p.name for p in folder.iterdir()) == ["version_000001", "version_000003"]
    again = trainer.write_weights(3, str(folder), frozenset(), "disk")
    assert (again.version, again.kind, again.path) == (3, "disk", str(folder / "version_000003"))
    assert [p.name for p in folder.iterdir()] == ["version_000003"]
    loaded = AutoModelForCausalLM.from_pretrained(again.path)
    assert torch.equal(loaded.model.norm.weight, load64(model).model.norm.weight.float())
