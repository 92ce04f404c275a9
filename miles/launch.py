"""A Python launch script in, the training command out: run here, or submitted to a Ray that already runs.

Nothing here stops a process or a Ray cluster: training starts what it needs and ends what it started.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer

from miles.errors import SettingsError

repo_base_dir = Path(__file__).resolve().parents[1]
DASHBOARD_PORT = 8265


@dataclass
class ExecuteTrainConfig:
    """What every launch script can be told; scripts add their own fields in a subclass.

    ``extra_env_vars``: ``NAME=VALUE`` words, separated by spaces. ``dry_run``: check the command and start nothing.
    """

    num_nodes: int = 1
    output_dir: str = "runs"
    extra_env_vars: str = ""
    dry_run: bool = False


def dataclass_cli(function: Callable[..., Any], env_var_prefix: str = "MILES_SCRIPT_") -> Callable[..., Any]:
    """A function of one dataclass becomes one that typer can run: each field is an option.

    ``MILES_SCRIPT_FIELD`` in the environment stands for an option that isn't given.
    """
    (kind,) = [hint for name, hint in get_type_hints(function).items() if name != "return"]
    hints = get_type_hints(kind)

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        made = field.default_factory
        default = made() if made is not dataclasses.MISSING else field.default
        option = typer.Option(
            ... if default is dataclasses.MISSING else default, envvar=f"{env_var_prefix}{field.name.upper()}"
        )
        return inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hints[field.name]
        )

    def command(**values: Any) -> Any:
        try:
            return function(kind(**values))
        except SettingsError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(2) from None

    parameters = [parameter(field) for field in dataclasses.fields(kind) if field.init]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def execute_train(
    train_args: str,
    num_gpus_per_node: int | None = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    megatron_path: str | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Trains with ``train_args``, a command line. Raises SystemExit with the exit code of a run that fails.

    ``megatron_model_type`` and ``megatron_path`` are accepted and say nothing: the architecture is in the checkpoint.
    """
    config = config or ExecuteTrainConfig()
    if megatron_model_type or megatron_path:
        sys.stderr.write("note: megatron_model_type and megatron_path have no effect: the checkpoint has the sizes\n")
    added = _words_of_environment(config.extra_env_vars) | dict(extra_env_vars or {})
    added["PYTHONPATH"] = _python_path(added.get("PYTHONPATH"))
    words = shlex.split(train_args.replace("\\\n", " "))
    if num_gpus_per_node is not None and "--num-gpus-per-node" not in words:
        words += ["--num-gpus-per-node", str(num_gpus_per_node)]
    command = [sys.executable, str(repo_base_dir / train_script), *words]
    if config.dry_run:
        command.append("--dry-run")
    elif _on("MILES_SCRIPT_EXTERNAL_RAY") and _on("MILES_SCRIPT_ENABLE_RAY_SUBMIT", "1"):
        command = _ray_job(command, added)
    if _on("MILES_SCRIPT_ENV_REPORT"):
        sys.stderr.write("".join(f"{name}={value}\n" for name, value in sorted(added.items())))
    sys.stdout.write(shlex.join(command) + "\n")
    sys.stdout.flush()
    code = subprocess.run(command, env=os.environ | added, check=False).returncode
    if code:
        raise SystemExit(code)


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Flags that log to Weights & Biases; none where ``WANDB_API_KEY`` is not set."""
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    group = "_".join(word for word in (run_name_prefix, run_id or create_run_id()) if word)
    project = f"miles-{Path(test_file).stem}"
    return f"--use-wandb --wandb-project {shlex.quote(project)} --wandb-group {shlex.quote(group)} "


def create_run_id() -> str:
    """A name that no other run has: UTC time and a random tail."""
    return f"{time.strftime('%y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def convert_checkpoint(model_name: str, *_: Any, **__: Any) -> None:
    """Nothing to convert: training reads the folder of a Hugging Face model as it is."""
    sys.stderr.write(
        f"note: {model_name}: no conversion is needed, --hf-checkpoint and --ref-load take the HF folder\n"
    )


def hf_download_dataset(full_name: str, data_dir: str = "data") -> Path:
    """The folder with the data set ``owner/name``: ``data_dir/name`` if it is there, else downloaded to it.

    Raises SettingsError where it is neither there nor to be had.
    """
    folder = Path(data_dir) / full_name.rpartition("/")[2]
    if folder.is_dir() and any(folder.iterdir()):
        return folder
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(full_name, repo_type="dataset", local_dir=folder)
    except (OSError, ValueError) as error:
        raise SettingsError([f"data set {full_name} is not in {folder} and can't be downloaded: {error}"]) from error
    return folder


def exec_command_cpu(command: str, capture_output: bool = False) -> str | None:
    """Runs a bash command. Returns what it printed if that is asked for; raises CalledProcessError if it fails."""
    done = subprocess.run(["bash", "-c", command], check=True, text=True, capture_output=capture_output)
    return done.stdout if capture_output else None


def _ray_job(command: list[str], environment: Mapping[str, str]) -> list[str]:
    address = f"http://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{DASHBOARD_PORT}"
    runtime = json.dumps({"env_vars": dict(environment)})
    return ["ray", "job", "submit", "--address", address, "--runtime-env-json", runtime, "--", *command]


def _python_path(given: str | None) -> str:
    """The repository first, then all that was on the path: user modules stay importable."""
    inherited = [given, os.environ.get("PYTHONPATH")]
    parts = [str(repo_base_dir), *(p for paths in inherited if paths for p in paths.split(os.pathsep) if p)]
    return os.pathsep.join(dict.fromkeys(parts))


def _words_of_environment(text: str) -> dict[str, str]:
    words = shlex.split(text)
    if wrong := [word for word in words if "=" not in word]:
        raise SettingsError([f"extra_env_vars takes NAME=VALUE words, not {', '.join(wrong)}"])
    return dict(word.split("=", 1) for word in words)


def _on(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true", "yes", "on")
