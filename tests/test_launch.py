"""User launch scripts run unchanged, from anywhere, and start nothing on a dry run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.errors import SettingsError
from miles.launch import create_run_id, hf_download_dataset

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart"
SCRIPT = """
from dataclasses import dataclass

import typer

import miles.utils.external_utils.command_utils as U


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model: str = "nowhere"
    batch: int = 2


@U.dataclass_cli
def main(args: ScriptArgs):
    U.execute_train(
        train_args=f"--hf-checkpoint {args.model} --prompt-data PROMPTS --input-key prompt --label-key label "
        f"--rm-type exact_match --fully-async --num-rollout 1 --rollout-batch-size {args.batch} "
        "--n-samples-per-prompt 2 --rollout-max-response-len 8 ",
        num_gpus_per_node=2,
        megatron_model_type="qwen3-4B",
        train_script="train_async.py",
        extra_env_vars={"MINE": "1"},
        config=args,
    )


if __name__ == "__main__":
    typer.run(main)
""".replace("PROMPTS", str(QUICKSTART / "prompts.jsonl"))


def launch(folder, *options, **environment):
    """Runs the script in a folder that is not the repository's."""
    (folder / "script.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "script.py", *options], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )


def test_dry_run_of_a_user_script_prints_the_command_and_starts_nothing(tmp_path):
    done = launch(tmp_path, "--dry-run", "--model", str(QUICKSTART / "model"))
    assert done.returncode == 0, done.stderr
    assert "would run: " in done.stdout and "no problems" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["script.py"]


def test_dry_run_names_a_model_that_is_not_there(tmp_path):
    done = launch(tmp_path, "--dry-run", MILES_SCRIPT_BATCH="3")
    assert done.returncode == 2
    assert "--hf-checkpoint" in done.stderr and "nowhere" in done.stderr and "Traceback" not in done.stderr
    assert "--rollout-batch-size 3" in done.stdout


def test_the_child_keeps_the_python_path(tmp_path):
    mine = f"{tmp_path}{os.pathsep}{ROOT}"
    done = launch(tmp_path, "--dry-run", PYTHONPATH=mine, MILES_SCRIPT_ENV_REPORT="1")
    assert f"PYTHONPATH={ROOT}{os.pathsep}{tmp_path}\n" in done.stderr and "MINE=1" in done.stderr


def test_door_runs_from_elsewhere_with_an_empty_python_path(tmp_path):
    flags = ["--hf-checkpoint", str(QUICKSTART / "model"), "--dry-run"]
    env = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "train_async.py", *flags], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_data_sets_that_are_here_need_no_network(tmp_path, monkeypatch):
    (tmp_path / "math").mkdir()
    (tmp_path / "math/train.jsonl").write_text("{}\n")
    assert hf_download_dataset("somebody/math", str(tmp_path)) == tmp_path / "math"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match="somebody/other"):
        hf_download_dataset("somebody/other", str(tmp_path))


def test_run_ids_differ():
    assert create_run_id() != create_run_id()
