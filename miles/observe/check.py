"""Settings in, problems out: trackers whose packages are not there, and names that are no folder's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePath

from miles.config import Problems, Settings


def check(settings: Settings, problems: Problems) -> None:
    """The observe room's own settings."""
    run = settings.run
    for package, wanted in (("wandb", run.use_wandb), ("trackio", run.use_trackio)):
        if wanted and find_spec(package) is None:
            problems.add(
                f"--use-{package}",
                "",
                f"the package {package} is not installed",
                f"pip install 'miles[{package}]' works",
            )
    for flag, name in (
        ("--run-name", run.run_name),
        ("--tb-project-name", run.tb_project_name),
        ("--tb-experiment-name", run.tb_experiment_name),
    ):
        if name is not None and (PurePath(name).name != name or name in ("", "..")):
            problems.add(flag, name, "is no name of one folder", f"{PurePath(name).name or 'first'} works")
