"""Settings in, every room's problems out, before anything starts."""

from __future__ import annotations

import os

import miles.data.check
import miles.engine.check
import miles.rollout.check
import miles.rollout.rm_hub.check
import miles.train.check
from miles.config import Problems, Settings
from miles.engine.backends import has_accelerator

ROOMS = (miles.data.check, miles.rollout.check, miles.rollout.rm_hub.check, miles.engine.check, miles.train.check)


def check(settings: Settings, problems: Problems) -> None:
    """Asks every room; nothing is raised here."""
    for room in ROOMS:
        room.check(settings, problems)
    _check_intervals(settings, problems)
    _warn_of_few_cores(settings, problems)


def _check_intervals(settings: Settings, problems: Problems) -> None:
    if settings.eval.eval_interval is None and settings.eval.eval_prompt_data:
        problems.warn("--eval-prompt-data is given but --eval-interval is not: nothing will be evaluated")


def _warn_of_few_cores(settings: Settings, problems: Problems) -> None:
    cores = os.cpu_count() or 1
    processes = settings.num_engines + settings.trainer_ranks
    if processes > cores and not has_accelerator():
        problems.warn(
            f"{settings.num_engines} engines and {settings.trainer_ranks} trainer ranks share {cores} CPU cores"
        )
