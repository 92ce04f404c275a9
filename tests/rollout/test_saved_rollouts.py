"""Rollouts that were kept come back as they were, and a file that is none says so."""

import pytest

from miles.config import Problems
from miles.errors import DataError
from miles.rollout.check import check
from miles.rollout.saved_rollouts import SavedFeed, load_groups, save_groups
from miles.sim import clock
from miles.types import Sample, VersionSpan
from tests.virtual import settings_of

torch = pytest.importorskip("torch")


def sampled(index, group, version=2):
    sample = Sample(
        index=index, group_index=group, tokens=[7], prompt="p", label="l", metadata={"row": [1]}, submit_version=version
    )
    sample.append_response([1, 2], [-0.5, -0.25], [VersionSpan(version, 0, 2)])
    sample.reward, sample.status = {"score": 1.0}, Sample.Status.TRUNCATED
    return sample


def test_groups_come_back_as_they_were(tmp_path):
    groups = [[sampled(0, 0), sampled(1, 0)], [[sampled(2, 1), sampled(3, 1)], sampled(4, 1)]]
    template = str(tmp_path / "deep/{rollout_id}.pt")
    save_groups(template, 5, groups)
    assert load_groups(template, 5) == groups
    kept = torch.load(tmp_path / "deep/5.pt", weights_only=True)
    assert kept["rollout_id"] == 5
    assert [sample["index"] for sample in kept["samples"]] == [0, 1, 2, 3, 4]


def test_a_file_with_nothing_but_samples_is_split_by_group(tmp_path):
    samples = [sampled(i, i // 2).to_dict() for i in range(4)]
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    groups = load_groups(str(tmp_path / "{rollout_id}.pt"), 0)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("content", [b"", b"no torch file", None])
def test_what_is_no_file_of_rollouts_is_named(tmp_path, content):
    template, path = str(tmp_path / "{rollout_id}.pt"), tmp_path / "3.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        load_groups(template, 3)


def test_a_saved_batch_has_the_ages_that_it_had(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    save_groups(template, 0, [[sampled(0, 0), sampled(1, 0, version=4)]])
    [group] = clock.run(SavedFeed(template).take(0))
    assert (group.oldest_version, group.newest_version) == (2, 4)


def lines(flags):
    problems = Problems()
    check(settings_of(f"--rollout-batch-size 1 --rollout-max-response-len 8 {flags}"), problems)
    return problems.lines


def test_templates_that_cannot_work_are_refused(tmp_path):
    for flag in ("--save-debug-rollout-data", "--load-debug-rollout-data"):
        [line] = lines(f"{flag} same.pt")
        assert line.startswith(f"{flag} same.pt: every step would have the same file")
    [line] = lines(f"--load-debug-rollout-data {tmp_path}/{{rollout_id}}.pt --start-rollout-id 4")
    assert f"there is no {tmp_path}/4.pt" in line
    save_groups(str(tmp_path / "{rollout_id}.pt"), 0, [])
    assert lines(f"--load-debug-rollout-data {tmp_path}/{{rollout_id}}.pt") == []
    [line] = lines(f"--load-debug-rollout-data {tmp_path}/{{rollout_id}}.pt --eval-interval 2")
    assert line.startswith("--eval-interval 2: no engine starts")
    [line] = lines(f"--load-debug-rollout-data {tmp_path}/{{rollout_id}}.pt --debug-rollout-only")
    assert line.startswith("--debug-rollout-only: --load-debug-rollout-data generates nothing")
