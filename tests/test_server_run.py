"""A whole run on the backend `sglang`, whose server is played by the embedded engine behind SGLang's command line.

What is real: the launch through another interpreter, readiness by health, weights through a folder. What is not: SGLang.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "run.sh"
LIMIT_S = 240

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]

INTERPRETER = f"""#!{sys.executable}
import argparse, os, sys
if sys.argv[1] == "-c":
    sys.exit(sys.argv[3] != "sglang")
assert sys.argv[1:3] == ["-m", "sglang.launch_server"], sys.argv
assert "PYTHONPATH" not in os.environ
parser = argparse.ArgumentParser()
for flag in ("--host", "--tp-size", "--random-seed"):
    parser.add_argument(flag)
parser.add_argument("--skip-server-warmup", action="store_true")
engine_flags = parser.parse_known_args(sys.argv[3:])[1]
os.environ["PYTHONPATH"] = {str(ROOT)!r}
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "miles.engine.local", *engine_flags])
"""
DRIVER = f"""#!{sys.executable}
import sys
import miles.engine.check
from miles import cli
miles.engine.check.has_accelerator = lambda: True
sys.exit(cli.train(sys.argv[2:], program="train_async"))
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_run_trains_on_a_server_in_an_environment_of_its_own(tmp_path):
    python = write_program(tmp_path / "env" / "bin" / "python", INTERPRETER)
    driver = write_program(tmp_path / "driver", DRIVER)
    flags = (
        "--run-name r --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-backend sglang "
        f"--engine-python {python} --max-weight-staleness 0 --eval-interval 3 --skip-eval-before-train"
    )
    done = subprocess.run(
        ["bash", str(QUICKSTART), *flags.split()],
        cwd=tmp_path, env=os.environ | {"PYTHON": str(driver), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    home = tmp_path / "runs" / "r"
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert [row["rollout/weight_version/min"] for row in steps] == [1, 2, 3], (
        "each step trains on its own weights' samples"
    )
    assert all(abs(row["train/train_rollout_logprob_abs_diff"]) < 1e-3 for row in steps)
