"""Settings in, every room's problems out, before anything starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import miles.config.effects
import miles.data.check
import miles.engine.check
import miles.observe.check
import miles.rollout.check
import miles.rollout.rm_hub.check
import miles.train.check
from miles.config import Problems, Settings
from miles.driver.checkpoints import find_checkpoint
from miles.driver.resume import compare
from miles.engine.backends import has_accelerator
from miles.rollout.saved_rollouts import path_of

ROOMS = (
    miles.config.effects,
    miles.data.check,
    miles.rollout.check,
    miles.rollout.rm_hub.check,
    miles.engine.check,
    miles.train.check,
    miles.observe.check,
)


def check(settings: Settings, problems: Problems) -> None:
    """Asks every room; nothing is raised here."""
    for room in ROOMS:
        room.check(settings, problems)
    _check_intervals(settings, problems)
    _check_folders(settings, problems)
    _check_steps(settings, problems)
    _check_writable(settings, problems)
    _warn_of_few_cores(settings, problems)


def _check_intervals(settings: Settings, problems: Problems) -> None:
    if settings.eval.eval_interval is None and settings.eval_datasets:
        problems.warn(f"{settings.eval_flag} is given but --eval-interval is not: nothing will be evaluated")


def _check_folders(settings: Settings, problems: Problems) -> None:
    """What ``--load`` and ``--ref-load`` name can be read here, and leaves steps to train."""
    load, reference = settings.checkpoint.load, settings.checkpoint.ref_load
    foreign = [
        (flag, path)
        for flag, path in (("--load", load), ("--ref-load", reference))
        if path is not None and _is_foreign(path)
    ]
    if foreign:
        problems.add(
            " and ".join(f"{flag} {path}" for flag, path in foreign), "",
            "holds neither a checkpoint of miles nor a model in Hugging Face format",
            "--hf-checkpoint with a model folder in Hugging Face format works, without this",
        )  # fmt: skip
    elif not settings.uses_reference:
        if reference is not None:
            problems.warn("--ref-load has no effect without a KL term: the run starts from --hf-checkpoint")
    elif reference is None:
        problems.note("--ref-load is not set: the reference of the KL term is the model of --hf-checkpoint")
    elif not Path(reference, "config.json").is_file() and find_checkpoint(reference) is None:
        problems.add(
            "--ref-load", reference, "holds no model and no checkpoint, and the KL term needs a reference",
            "leave it out for --hf-checkpoint, or a folder in Hugging Face format or a checkpoint of a run works",
        )  # fmt: skip
    checkpoint, total = find_checkpoint(load), settings.rollout.num_rollout
    if checkpoint is not None:
        comparison = compare(checkpoint.about, settings)
        problems.lines += comparison.refused
        for line in comparison.changed:
            problems.note(line)
    if load is not None and checkpoint is None and not foreign:
        problems.warn(f"--load {load} holds no checkpoint: the run starts from --hf-checkpoint")
    if checkpoint is not None and total is not None and checkpoint.step >= total:
        problems.add(
            "--num-rollout", total, f"the checkpoint in --load {load} has trained {checkpoint.step} steps already",
            f"{checkpoint.step + 1} or more works",
        )  # fmt: skip


def _check_steps(settings: Settings, problems: Problems) -> None:
    """Where the run is told to start and to end, something is left between."""
    load, total = settings.checkpoint.load, settings.rollout.num_rollout
    first, last = settings.debug.start_rollout_id, settings.debug.debug_exit_after_rollout
    checkpoint = find_checkpoint(load)
    start = checkpoint.step if checkpoint else first or 0
    if first is not None and checkpoint is not None and first != start:
        problems.add("--start-rollout-id", first, f"the checkpoint in --load {load} goes on at {start}", "leave it out")
    elif first is not None and (first < 0 or (total is not None and first >= total)):
        of = f", and --num-rollout is {total}" if total is not None else ""
        problems.add("--start-rollout-id", first, f"training steps count from 0{of}", "0 works")
    if last is not None and last < start:
        problems.add(
            "--debug-exit-after-rollout", last, f"the run starts with training step {start}", f"{start} or more works"
        )


def _check_writable(settings: Settings, problems: Problems) -> None:
    """Every folder that the run will write can be made and written now, not only after days of training."""
    kept = settings.debug.save_debug_rollout_data
    folders = {
        "--save-debug-rollout-data": None if kept is None else str(path_of(kept, 0).parent),
        "--run-dir": settings.run.run_dir,
        "--save": settings.checkpoint.save,
        "--save-hf": settings.checkpoint.save_hf,
        "--update-weight-disk-dir": settings.engine.update_weight_disk_dir,
    }
    for flag, folder in folders.items():
        if folder is not None and (why := _why_not_writable(Path(folder))) is not None:
            problems.add(flag, folder, f"can't be written ({why})", "a folder that you may write works")


def _why_not_writable(folder: Path) -> str | None:
    """Tries it on the nearest folder that is there, and leaves nothing behind."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _is_foreign(path: str) -> bool:
    """There is something, and it is neither a run's, a checkpoint of ours nor a Hugging Face model."""
    folder = Path(path)
    if not folder.is_dir():
        return folder.exists()
    marks = ("config.json", "settings.json", "metrics.jsonl", "checkpoint.json", "step_*")
    return any(folder.iterdir()) and not any(found for mark in marks for found in folder.glob(mark))


def _warn_of_few_cores(settings: Settings, problems: Problems) -> None:
    cores = os.cpu_count() or 1
    processes = settings.num_engines + settings.trainer_ranks
    if processes > cores and not has_accelerator():
        problems.warn(
            f"{settings.num_engines} engines and {settings.trainer_ranks} trainer ranks share {cores} CPU cores"
        )
