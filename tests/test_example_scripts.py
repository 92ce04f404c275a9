"""The launch scripts of the examples train the quickstart model, with model, sizes and device overridden, to their end."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_runs import LIMIT_S, descendants, process_of, read_until, rows

ENDS_WITHIN_S = 30
ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/quickstart/model"
MATH = ["bash", str(ROOT / "examples/fully_async/run-qwen3-4b-fully_async.sh")]
MIXTURE = [sys.executable, str(ROOT / "examples/fully_async/run_qwen3_30b_a3b_fully_async.py")]
RANDOM = ["bash", str(ROOT / "examples/infra_features/random_async/run-random_async.sh")]
DATA = "dapo-math-17k/dapo-math-17k.jsonl"
MATH_SIZES = {
    "MODEL": str(MODEL),
    "DATA": DATA,
    "NUM_ROLLOUT": "2",
    "ROLLOUT_BATCH_SIZE": "4",
    "SAMPLES_PER_PROMPT": "2",
    "GLOBAL_BATCH_SIZE": "8",
    "MAX_RESPONSE_LEN": "8",
    "MAX_TOKENS_PER_GPU": "512",
    "TRAINER_GPUS": "1",
    "ROLLOUT_GPUS": "1",
}
MIXTURE_SIZES = (
    f"--model-dir {MODEL.parent} --model-name {MODEL.name} --data-dir . --num-rollout 2 --rollout-batch-size 4 "
    "--n-samples-per-prompt 2 --max-response-len 8 --max-tokens-per-gpu 512 --trainer-gpus 1 --rollout-gpus 1 "
    "--gpus-per-engine 1"
).split()
TEMPLATED = ["--chat-template-path", "template.jinja", "--run-name", "r"]


@pytest.fixture
def folder(tmp_path):
    """Where a user would start the scripts: with a data set of messages, and the tiny model's chat template."""
    lines = [{"prompt": [{"role": "user", "content": f"88544{i}"}], "label": str(i)} for i in range(8)]
    (tmp_path / DATA).parent.mkdir()
    (tmp_path / DATA).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}=")
    return tmp_path


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MILES_")}
    return kept | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | more


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([*MATH, *TEMPLATED, "--dry-run"], MATH_SIZES),
        ([*MIXTURE, *MIXTURE_SIZES, "--extra-args", " ".join(TEMPLATED), "--dry-run"], {}),
        ([*RANDOM, "--dry-run"], {}),
    ],
    ids=["math", "mixture", "random"],
)
def test_a_dry_run_passes_and_starts_nothing(folder, words, sizes):
    done = subprocess.run(words, cwd=folder, env=environment(**sizes), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "no problems: " in done.stdout
    assert not (folder / "runs").exists()


def ends(pid):
    """Waits for a process that may still be on its way out; False if it stays."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], ENDS_WITHIN_S)[0])
    finally:
        os.close(watched)


def trained(folder, words, steps, **more):
    """Runs a script to its end. Returns its metrics by step; nothing that it started is left."""
    with process_of(words, folder, environment(**more)) as process:
        read_until(process, r"^step 1/")
        family = descendants(process.pid)
        output = process.stdout.read()
        assert process.wait(LIMIT_S) == 0, output[-3000:]
    assert len(family) > 3
    assert [pid for pid in family if not ends(pid)] == []
    found = rows(folder / "runs/r", "step")
    assert list(found) == list(range(1, steps + 1))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("function", ["", "fully_async_rollout.generate_rollout_fully_async"])
def test_math_trains_to_its_last_step_with_either_selector(folder, function):
    trained(folder, [*MATH, *TEMPLATED], 2, ROLLOUT_FUNCTION=function, SAVE="kept", **MATH_SIZES)
    assert (folder / "kept/latest").read_text() == "step_000002"


@pytest.mark.slow
def test_the_mixture_of_experts_script_trains_to_its_last_step(folder):
    steps = trained(folder, [*MIXTURE, *MIXTURE_SIZES, "--extra-args", " ".join(TEMPLATED)], 2)
    assert max(row["rollout/fully_async/max_staleness"] for row in steps.values()) <= 4
    assert (folder / "checkpoints/model-fully-async/latest").read_text() == "step_000002"


@pytest.mark.slow
def test_random_rollouts_train_without_data(folder):
    sizes = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--global-batch-size", "8"]
    steps = trained(folder, [*RANDOM, *sizes, "--num-rollout", "3", "--run-name", "r"], 3)
    lengths = [steps[n]["rollout/response_len/mean"] for n in steps]
    assert len(set(lengths)) > 1 and max(lengths) <= 8
    assert all(0 <= row["rollout/raw_reward"] <= 1 for row in steps.values())
