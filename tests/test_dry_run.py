"""A dry run finds what a real one would stumble over, names the flag that causes it, and starts nothing."""

import json
import shutil
from pathlib import Path

import pytest

from miles import cli

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart"
MODEL = QUICKSTART / "model"
MESSAGES = {"prompt": [{"role": "user", "content": "12="}], "label": "21"}


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Checks a run that works but for the flags it is given; its exit code and its problems, one a line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_hooks.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "sound_hooks.py").write_text("def f(*given):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(*flags):
        works = (
            f"--hf-checkpoint {MODEL} --prompt-data {QUICKSTART}/prompts.jsonl --input-key prompt --label-key label "
            "--rm-type exact_match --fully-async --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 "
            "--rollout-max-response-len 8 --dry-run"
        )
        code = cli.train([*works.split(), *map(str, flags)], program="train_async")
        assert not (tmp_path / "runs").exists()
        return code, [line[4:] for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]

    return run


def written(path, text):
    path.write_text(text)
    return path


def model(folder, **changed):
    """The quickstart's model with files of its own; ``__`` stands for the dot in their names."""
    shutil.copytree(MODEL, folder)
    for name, text in changed.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_what_works_passes(dry_run):
    assert dry_run() == (0, [])


@pytest.mark.parametrize(
    "flag",
    [
        "--custom-rm-path",
        "--custom-reward-post-process-path",
        "--custom-generate-function-path",
        "--dynamic-sampling-filter-path",
        "--data-source-path",
        "--buffer-filter-path",
    ],
)
def test_hooks_that_cannot_be_imported(dry_run, flag):
    assert dry_run(flag, "sound_hooks.f") == (0, [])
    for path, why in (
        ("broken_hooks.f", "not_installed_anywhere"),
        ("sound_hooks.g", "has no g"),
        ("no_such_module.f", "there is no such module"),
        ("f", "module.function"),
    ):
        code, [line] = dry_run(flag, path)
        assert code == 2 and line.startswith(f"{flag} {path}: ") and why in line


def test_a_rollout_function_that_cannot_be_imported(dry_run):
    code, [line] = dry_run("--no-fully-async", "--rollout-function-path", "broken_hooks.f")
    assert code == 2 and line.startswith("--rollout-function-path broken_hooks.f: ") and "not_installed" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rm-type", "maths"], "--rm-type maths: there is no such reward type"),
        (["--rm-type", "remote_rm"], "--rm-url is not set"),
        (["--rm-type", "dapo"], "--reward-key is not set"),
        (["--prompt-data", "none.jsonl"], "--prompt-data none.jsonl: there is no such file"),
        (["--input-key", "question"], "--prompt-data"),
        (["--label-key", "answer"], "--prompt-data"),
        (["--eval-interval", 1, "--eval-prompt-data", "a", "none.parquet"], "--eval-prompt-data a none.parquet: "),
        (["--hf-checkpoint", "nowhere"], "--hf-checkpoint nowhere: there is no such folder"),
        (["--rollout-batch-size", 3, "--global-batch-size", 4], "--global-batch-size 4: "),
    ],
)
def test_rewards_data_and_sizes_that_cannot_work(dry_run, flags, named):
    code, lines = dry_run(*flags)
    assert code == 2 and [line for line in lines if line.startswith(named)], lines


@pytest.mark.parametrize(
    "text",
    ['{"prompt": "1=", "label": "1"}\n{"prompt": "2=", "la', '{"prompt": "", "label": "1"}\n', "", "\x80\n"],
    ids=["cut", "empty prompt", "empty file", "no text"],
)
def test_data_that_cannot_be_read(dry_run, tmp_path, text):
    (tmp_path / "rows.jsonl").write_bytes(text.encode("latin-1"))
    code, [line] = dry_run("--prompt-data", "rows.jsonl")
    assert code == 2 and line.startswith("--prompt-data rows.jsonl:")


def test_a_parquet_file_that_is_none(dry_run, tmp_path):
    code, [line] = dry_run("--prompt-data", written(tmp_path / "rows.parquet", "no parquet"))
    assert code == 2 and line.startswith("--prompt-data ") and "rows.parquet" in line


def test_help_lists_it(capsys):
    assert cli.train(["--help"], program="train_async") == 0
    assert "--dry-run " in capsys.readouterr().out


# ---- chat templates


def test_a_tokenizer_without_a_chat_template(dry_run):
    code, [line] = dry_run("--apply-chat-template")
    assert code == 2 and line.startswith("--apply-chat-template: the tokenizer in ")
    assert "has no chat template" in line and "--chat-template-path" in line


def test_a_chat_template_in_the_model_folder_or_in_a_file(dry_run, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    own = model(tmp_path / "own", chat_template__jinja=template)
    assert dry_run("--apply-chat-template", "--hf-checkpoint", own) == (0, [])
    file = written(tmp_path / "t.jinja", template)
    assert dry_run("--apply-chat-template", "--chat-template-path", file) == (0, [])


def test_a_chat_template_that_refuses_the_first_prompt(dry_run, tmp_path):
    rows = written(tmp_path / "chat.jsonl", json.dumps(MESSAGES) + "\n")
    strict = written(tmp_path / "t.jinja", "{{ raise_exception('a system message comes first') }}")
    code, [line] = dry_run("--apply-chat-template", "--chat-template-path", strict, "--prompt-data", rows)
    assert code == 2 and line.startswith(f"--prompt-data {rows}: the chat template can't render {rows}:1 ")
    assert "a system message comes first" in line
    own = ("--custom-generate-function-path", "sound_hooks.f")  # which may render prompts in its own way
    assert dry_run("--apply-chat-template", "--chat-template-path", strict, "--prompt-data", rows, *own) == (0, [])


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}'])
def test_a_tokenizer_that_is_damaged(dry_run, tmp_path, text):
    folder = model(tmp_path / "damaged", tokenizer__json=text)
    code, [line] = dry_run("--apply-chat-template", "--hf-checkpoint", folder)
    assert code == 2 and line.startswith(f"--hf-checkpoint {folder}: its tokenizer can't be loaded")
