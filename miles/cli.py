"""Command lines in, exit codes out: `miles train | check | audit`, and the doors train.py and train_async.py.

Exit codes: 0 done, 1 stopped by a failure, 2 settings that can't work, 130 interrupted (Ctrl-C), 143 terminated.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from miles.config import Problems, Settings
from miles.errors import MilesError, SettingsError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
DRY_RUN = "--dry-run"

app = typer.Typer(
    help="Fully-asynchronous reinforcement learning for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("train", context_settings=PASS_ON)
def _train(
    context: typer.Context,
    sync: Annotated[bool, typer.Option("--sync", help="train synchronously, like train.py")] = False,
) -> None:
    """Train. Takes the flags of train_async.py, or RUN.yaml and flags; --help lists them. --dry-run starts nothing."""
    raise typer.Exit(train(context.args, program="train" if sync else "train_async"))


@app.command("check", context_settings=PASS_ON)
def _check(
    context: typer.Context,
    sync: Annotated[bool, typer.Option("--sync", help="check the flags of train.py")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="list all settings and where each comes from")] = False,
) -> None:
    """Check the flags of a run and report every problem; nothing starts."""
    raise typer.Exit(check(context.args, program="train" if sync else "train_async", explain=explain))


@app.command("audit")
def _audit(run: Annotated[Path, typer.Argument(help="the folder of a run")]) -> None:
    """Prove from a run's files that each prompt was trained once or given up, and that versions, ages and tokens add up."""
    raise typer.Exit(audit(run))


def main() -> None:
    app()


def train(argv: Sequence[str], *, program: Literal["train", "train_async"]) -> int:
    """Trains as the flags say; with ``--dry-run`` only prints the command and checks it. Returns the exit code."""
    if "--help" in argv or "-h" in argv:
        parser = Settings.parser(f"{program}.py")
        parser.add_argument(DRY_RUN, action="store_true", help="print the command, check it and start nothing")
        sys.stdout.write(parser.format_help())
        return 0
    try:
        if DRY_RUN in argv:
            return _dry_run([word for word in argv if word != DRY_RUN], program)
        settings = _checked(argv, program)
        from miles.driver.run import run

        return run(settings)
    except SettingsError as error:
        return _stop(str(error), 2)
    except (MilesError, OSError) as error:
        return _stop(f"miles stopped: {error}", 1)
    except KeyboardInterrupt:
        return _stop("interrupted", 130)
    except asyncio.CancelledError:
        return _stop("terminated", 143)


def check(argv: Sequence[str], *, program: Literal["train", "train_async"], explain: bool = False) -> int:
    """Reports every problem of the flags; with ``explain`` also what they come to. Returns the exit code."""
    try:
        settings = _checked(argv, program, explain)
    except SettingsError as error:
        return _stop(str(error), 2)
    sys.stdout.write(
        f"no problems: {settings.mode}, {settings.num_engines} engine(s), {settings.trainer_ranks} trainer rank(s), "
        f"{settings.rollout.rollout_batch_size} prompts x {settings.rollout.n_samples_per_prompt} samples = "
        f"{settings.batch_samples} per step, {settings.optimizer_steps} optimizer step(s) of "
        f"{settings.samples_per_optimizer_step} samples\n"
    )
    return 0


def audit(run: Path) -> int:
    """Prints the account of a run and every violation of it. Returns the exit code: 1 where there is one."""
    from miles.driver.audit import audit as audited
    from miles.driver.audit import shown

    try:
        result = audited(run)
    except MilesError as error:
        return _stop(str(error), 1)
    sys.stdout.write(shown(result))
    return 1 if result.violations else 0


def _dry_run(argv: Sequence[str], program: Literal["train", "train_async"]) -> int:
    """Prints the command that would run, and checks it."""
    sys.stdout.write(f"would run: {shlex.join([sys.executable, sys.argv[0], *argv])}\n")
    sys.stdout.flush()
    return check(argv, program=program)


def _checked(argv: Sequence[str], program: Literal["train", "train_async"], explain: bool = False) -> Settings:
    from miles.driver.check import check as check_rooms

    problems = Problems()
    settings = Settings.parse(argv, problems, program)
    check_rooms(settings, problems)
    if explain:
        from miles.config.explain import explain as explained

        sys.stdout.write(explained(settings))
    for line in problems.warnings:
        sys.stderr.write(f"warning: {line}\n")
    problems.raise_all()
    for line in problems.notes:
        sys.stderr.write(f"note: {line}\n")
    return settings


def _stop(message: str, code: int) -> int:
    sys.stderr.write(message + "\n")
    return code
