"""Changed settings and data are seen: allowed with a line, or refused with the reason."""

import json

import pytest

from miles.config import Problems, Settings
from miles.driver.resume import about, code_version, compare, data_marks


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a"}\n' * 4)
    return path


def settings_of(rows, *flags):
    base = ["--prompt-data", str(rows), "--rollout-batch-size", "4", "--lr", "1e-4", "--rollout-max-response-len", "8"]
    return Settings.parse([*base, *flags], Problems())


def compared(rows, *flags):
    saved = json.loads(json.dumps(about(settings_of(rows))))
    return compare(saved, settings_of(rows, *flags))


def test_the_same_settings_need_no_word(rows):
    result = compared(rows)
    assert (result.changed, result.refused, result.keeps_finished) == ([], [], True)


@pytest.mark.parametrize("flags", [("--num-rollout", "99"), ("--run-name", "x"), ("--load", "y")])
def test_what_may_change_in_silence(rows, flags):
    assert compared(rows, *flags).changed == []


def test_a_change_is_told_with_both_values(rows):
    assert compared(rows, "--lr", "1e-5").changed == ["--lr: 0.0001 in the checkpoint, 1e-05 now"]
    assert compared(rows, "--lr", "1e-5").keeps_finished


@pytest.mark.parametrize(
    "flags",
    [
        ("--rollout-temperature", "0.5"),
        ("--rm-type", "math"),
        ("--n-samples-per-prompt", "8"),
        ("--rollout-batch-size", "2"),
        ("--max-weight-staleness", "1"),
        ("--apply-chat-template",),
    ],
)
def test_what_decides_about_finished_groups_makes_them_sampled_again(rows, flags):
    result = compared(rows, *flags)
    assert not result.keeps_finished
    [line] = result.changed
    assert line.startswith(flags[0])
    assert "sampled again" in line


def test_other_content_of_the_same_file_is_refused_and_another_place_is_not(rows, tmp_path):
    saved = about(settings_of(rows))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(rows.read_bytes())
    assert compare(saved, settings_of(moved)).refused == []
    rows.write_text('{"input": "b"}\n' * 4)
    [line] = compare(saved, settings_of(rows)).refused
    assert str(rows) in line and "skipped or repeated" in line


def test_another_code_is_told(rows):
    saved = about(settings_of(rows)) | {"code_version": "0.0+1"}
    assert compare(saved, settings_of(rows)).changed == [f"miles: 0.0+1 wrote the checkpoint, {code_version()} goes on"]


def test_words_that_name_no_file_are_left_to_the_check_of_the_prompts():
    assert data_marks(["nowhere.jsonl", "rows.jsonl@[x]"]) == [["nowhere.jsonl", ""], ["rows.jsonl@[x]", ""]]
