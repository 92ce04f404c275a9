"""Laws of the start-up check: each thing wrong with the prompts is one problem with flag, value and what works."""

import re
import subprocess
import sys

import pytest

from miles.config import Problems, Settings
from miles.data.check import check
from miles.data.rows import Row


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n' * 5)
    return path


def problems_of(*flags):
    problems = Problems()
    settings = Settings.parse([str(f) for f in flags], problems)
    check(settings, problems)
    return problems.lines


def good(rows, *more):
    return ("--prompt-data", rows, "--input-key", "prompt", "--label-key", "label", "--num-rollout", 2, *more)


def test_usable_prompts_are_no_problem(rows):
    assert problems_of(*good(rows, "--eval-prompt-data", "x", rows, "y", rows, "--eval-interval", 1)) == []
    assert problems_of(*good(rows, "--eval-prompt-data", rows)) == []


@pytest.mark.parametrize(("flags", "said"), [
    (["--prompt-data", "none.jsonl"], "--prompt-data none.jsonl: there is no such file"),
    (["--prompt-data", "{rows}@[7:]"], r"rows.jsonl@\[7:\]: @\[7:\] has none of the 5 rows; @\[0:5\] works"),
    (["--prompt-data", "{rows}@[3]"], r"@\[3\] is no slice of rows; @\[0:1000\], @\[1000:\] and @\[:-500\] work"),
    (["--prompt-data", "rows.csv"], "files of type .csv can't be read; a .jsonl or .parquet file works"),
    (["--prompt-data", "none.parquet"], "--prompt-data none.parquet: there is no such file"),
    (["--prompt-data", "{rows}*x"], r"\*x is no weight; a number above 0 works"),
    (["--prompt-data", "{rows}", "{rows}*2"], r"rows.jsonl: has no weight, and 1 others have; .*rows.jsonl\*1 works"),
    (["--prompt-data", "{rows}*1", "{rows}*0.01"], r"\*0.01 of 1.01 is 0.099 of the 10 draws of an epoch"),
    (["--eval-prompt-data", "a", "{rows}*2"], "weights mix training prompts"),
    (["--prompt-data", "{rows}", "--tool-key", "prompt"], r'rows.jsonl:1: tools "prompt" is text; a list of tool'),
    (["--rollout-max-context-len", "64", "--rollout-max-prompt-len", "64"],
     "--rollout-max-prompt-len 64: of --rollout-max-context-len 64 tokens that leaves none for a response; 63 or less"),
    (["--rollout-max-context-len", "64", "--eval-max-prompt-len", "99"], "--eval-max-prompt-len 99: of"),
    (["--chat-template-path", "none.jinja"], "--chat-template-path none.jinja: there is no such file"),
    (["--data-source-path", "no_such.Source"], "--data-source-path no_such.Source: .* no such module"),
    (["--buffer-filter-path", "miles.hooks.nothing"], "--buffer-filter-path miles.hooks.nothing: .* has no nothing"),
    (["--disable-rollout-global-dataset"], "--disable-rollout-global-dataset: every prompt is empty"),
    (["--input-key", "question"], r'rows.jsonl:1: has no prompt key "question"; its keys are "prompt", "label"'),
    (["--label-key", "answer"], r'rows.jsonl:1: has no label key "answer"; its keys are "prompt", "label"'),
    (["--eval-interval", "5"], "--eval-prompt-data is not set: --eval-interval is 5"),
    (["--eval-prompt-data", "a", "b", "c"], "--eval-prompt-data a b c: 3 words are no NAME PATH pairs"),
    (["--eval-prompt-data", "a", "none.jsonl"], "--eval-prompt-data a none.jsonl: there is no such file"),
    (["--eval-label-key", "x", "--eval-prompt-data", "a", "{rows}"], r'rows.jsonl:1: has no label key "x"'),
    (["--eval-prompt-data", "a", "{rows}", "a", "{rows}"], "--eval-prompt-data a: the name is given to 2 files"),
])  # fmt: skip
def test_each_fault_is_one_problem(rows, flags, said):
    (line,) = problems_of(*good(rows), *(f.replace("{rows}", str(rows)) for f in flags))
    assert re.search(said, line), line


@pytest.mark.parametrize("flags", [
    ["--disable-rollout-global-dataset"], ["--data-source-path", "miles.rollout.data_source.DataSource"],
])  # fmt: skip
def test_without_prompts_of_ours_epochs_have_no_length(flags):
    (line,) = problems_of(*flags, "--custom-generate-function-path", "own.generate", "--num-epoch", 1)
    assert line == "--num-epoch 1: without --prompt-data an epoch has no length; --num-rollout 100 works"
    assert problems_of(*flags, "--custom-generate-function-path", "own.generate", "--num-rollout", 1) == []


def test_autofix_is_an_old_name_of_no_template():
    problems = Problems()
    settings = Settings.parse(["--chat-template-path", "autofix"], problems)
    check(settings, problems)
    assert not any("--chat-template-path" in line for line in problems.lines)
    assert any("--chat-template-path autofix" in line for line in problems.warnings)
    assert settings.namespace().chat_template_path is None


def test_generated_rows_are_not_all_made_by_the_check(monkeypatch):
    made = []

    class Rows(list):
        def __getitem__(self, i):
            made.append(i)
            return Row(1, "q", "a", {})

    monkeypatch.setattr("miles.data.words._gym_tasks", lambda where: Rows([None] * 500))
    assert problems_of("--prompt-data", "reasoning_gym:slow", "--num-rollout", 1) == []
    assert made == [0]


def test_messages_for_a_hook_need_no_template(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"input": [{"role": "user", "content": "hi"}]}\n')
    assert (
        problems_of("--prompt-data", path, "--num-rollout", 1, "--custom-generate-function-path", "own.generate") == []
    )


def test_a_run_needs_prompts_and_an_end():
    lines = problems_of()
    assert any(line.startswith("--prompt-data is not set") for line in lines)
    assert any(line.startswith("--num-rollout is not set: nor is --num-epoch") for line in lines)


def test_epochs_too_short_for_a_step_show_the_arithmetic(rows):
    flags = ("--prompt-data", rows, "--input-key", "prompt", "--num-epoch", 2, "--rollout-batch-size")
    assert problems_of(*flags, 10) == []
    (line,) = problems_of(*flags, 11)
    assert "2 epochs x 5 rows = 10 prompts, fewer than the 11 of one step" in line
    assert "--num-epoch 3" in line


def test_messages_need_the_template_flag(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"input": [{"role": "user", "content": "hi"}]}\n')
    (line,) = problems_of("--prompt-data", path, "--num-rollout", 1)
    assert "with --apply-chat-template it works" in line
    assert problems_of("--prompt-data", path, "--num-rollout", 1, "--apply-chat-template") == []


def test_data_room_imports_without_torch():
    code = "import sys, miles.data, miles.data.check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_that_cannot_be_used_is_named_once(rows):
    rows.write_text('{"prompt": "1+1="}\n')
    [line] = problems_of(*good(rows))
    assert line.startswith(f"--prompt-data {rows}:1: ") and line.count(str(rows)) == 1
