"""The launch scripts of the examples train the quickstart model, with model, sizes and device overridden, to their end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/fully_async/run-qwen3-4b-fully_async.sh"
SIZES = {
    "NUM_ROLLOUT": "2",
    "ROLLOUT_BATCH_SIZE": "4",
    "SAMPLES_PER_PROMPT": "2",
    "GLOBAL_BATCH_SIZE": "8",
    "MAX_RESPONSE_LEN": "8",
    "MAX_TOKENS_PER_GPU": "512",
    "TRAINER_GPUS": "1",
    "ROLLOUT_GPUS": "1",
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="


def launch(folder, *flags, **environment):
    lines = [{"prompt": [{"role": "user", "content": f"88544{i}"}], "label": str(i)} for i in range(8)]
    (folder / "math.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "template.jinja").write_text(TEMPLATE)
    here = {"MODEL": str(ROOT / "examples/quickstart/model"), "DATA": "math.jsonl", "PYTHON": sys.executable}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | SIZES | here | environment
    words = ["bash", str(SCRIPT), "--chat-template-path", "template.jinja", "--run-name", "r", *flags]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_a_dry_run_of_the_script_passes_and_starts_nothing(tmp_path):
    done = launch(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("function", ["", "fully_async_rollout.generate_rollout_fully_async"])
def test_math_trains_to_its_last_step_with_either_selector(tmp_path, function):
    done = launch(tmp_path, ROLLOUT_FUNCTION=function)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in metrics) == 2
