"""Checked settings in, a trained model and a run folder out: starts everything, turns the ring, shuts down in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from miles.cluster.run_actors import RunActors
from miles.cluster.session import ray_session
from miles.config import Settings
from miles.data.prompts import PromptSource
from miles.driver.checkpoints import Checkpoint, CheckpointFolder, find_checkpoint, read_json
from miles.driver.resume import about, compare
from miles.driver.ring import Ring, Schedule
from miles.driver.watch import Watch
from miles.errors import SettingsError, raising_first_cause
from miles.observe.live import LiveView
from miles.observe.observer import Observer
from miles.observe.run_folder import RunFolder
from miles.observe.trackers import trackers_of
from miles.rollout.lineage import StartingPoint

STATUS_INTERVAL_S = 0.5


def run(settings: Settings) -> int:
    """One run from start to end. Returns the exit code; raises `MilesError` with the first cause, or KeyboardInterrupt."""
    checkpoint = find_checkpoint(settings.checkpoint.load)
    total = total_steps(settings)
    steps = steps_to_run(settings, checkpoint, total)
    if not steps:
        raise SettingsError(
            [f"--num-rollout {total}: there is nothing to train from step {steps.start} on; {steps.start + 1} works"]
        )
    folder = _open_folder(settings, checkpoint)
    begins = starting_point(settings, folder.path, checkpoint, steps.start)
    with LiveView(folder.name, steps.stop, start_step=steps.start) as view:
        observer = Observer(folder, view)
        observer.started(settings.to_json())
        for name, opened in trackers_of(settings, folder.path, steps.start).items():
            observer.attach(name, opened)
        cause: str | None = "stopped"
        try:
            with ray_session():
                asyncio.run(_run(settings, observer, folder.path, begins, steps, total))
            cause = None
        except (KeyboardInterrupt, asyncio.CancelledError):
            cause = "interrupted"
            raise
        except Exception as error:  # invariant: whatever ends a run, its folder says so
            cause = str(error) or type(error).__name__
            raise
        finally:
            observer.close(cause)
    return 0


def total_steps(settings: Settings) -> int:
    """``--num-rollout``, or as many steps as ``--num-epoch`` holds."""
    if settings.rollout.num_rollout is not None:
        return settings.rollout.num_rollout
    rows = PromptSource.from_settings(settings).rows
    return (settings.data.num_epoch or 0) * rows // (settings.rollout.rollout_batch_size or 1)


def steps_to_run(settings: Settings, checkpoint: Checkpoint | None, total: int) -> range:
    """The training steps of this run, out of ``total``: from where its checkpoint is, to where it is told to end."""
    start, last = settings.debug.start_rollout_id or 0, settings.debug.debug_exit_after_rollout
    return range(checkpoint.step if checkpoint else start, total if last is None else min(total, last + 1))


def reference_folder(settings: Settings) -> str | None:
    """Where the weights of the reference policy are: a checkpoint or a folder in Hugging Face format; None: none is used."""
    if not settings.uses_reference:
        return None
    checkpoint = find_checkpoint(settings.checkpoint.ref_load)
    return checkpoint.folder if checkpoint else settings.checkpoint.ref_load or settings.model.hf_checkpoint


def _open_folder(settings: Settings, checkpoint: Checkpoint | None) -> RunFolder:
    """The run's folder. A resumed run goes on in the one that its checkpoint lies in, unless it has a name of its own."""
    home = Path(checkpoint.folder).parent.parent if checkpoint else None
    if home is not None and settings.run.run_name is None and (home / "settings.json").exists():
        folder = RunFolder(home)
    else:
        folder = RunFolder.open(Path(settings.run.run_dir), settings.run.run_name)
    places = {folder.path / "checkpoints", Path(settings.checkpoint.save or folder.path), folder.path}
    loaded = Path(checkpoint.folder).parent if checkpoint else Path(settings.checkpoint.load or "")
    if settings.checkpoint.load is not None and loaded.resolve() in {p.resolve() for p in places}:
        folder.go_back_to(checkpoint.step if checkpoint else 0)
    elif folder.used:
        raise SettingsError(
            [f"--run-name {folder.name}: {folder.path} holds another run; another name works, or --load {folder.path}"]
        )
    return folder


def starting_point(settings: Settings, home: Path, checkpoint: Checkpoint | None, first: int) -> StartingPoint:
    """Where the run starts, and whether what it had finished before may be trained under the settings of now."""
    if checkpoint is not None:
        keeps = compare(checkpoint.about, settings).keeps_finished
        return StartingPoint(checkpoint.step, checkpoint.version, checkpoint.folder, keeps)
    before = home / "settings.json"
    keeps = not before.exists() or compare({"settings": read_json(before)}, settings).keeps_finished
    return StartingPoint(first, keeps_finished=keeps)


def _checkpoint_folder(settings: Settings, home: Path) -> CheckpointFolder:
    saves = settings.checkpoint
    return CheckpointFolder(
        Path(saves.save) if saves.save else home / "checkpoints",
        about=about(settings),
        keep_last=saves.save_keep_last,
        keep_every=saves.save_keep_every,
        sentinel=Path(saves.save_trigger_sentinel) if saves.save_trigger_sentinel else None,
    )


async def _run(
    settings: Settings, observer: Observer, home: Path, begins: StartingPoint, steps: range, total: int
) -> None:
    checkpoints = _checkpoint_folder(settings, home)
    watch = Watch(observer, settings)
    actors = RunActors(
        settings,
        home=home,
        steps=steps,
        total_steps=total,
        begins=begins,
        reference=reference_folder(settings),
    )
    trains_nothing = settings.debug.debug_rollout_only
    schedule = Schedule(
        start=steps.start,
        total=steps.stop,
        version=begins.version - 1,
        publish_interval=steps.stop if trains_nothing else settings.engine.update_weights_interval,
        eval_interval=settings.eval.eval_interval,
        eval_before=not settings.eval.skip_eval_before_train,
        save_interval=settings.checkpoint.save_interval,
        saves=not trains_nothing,
    )
    ring = Ring(schedule, actors, actors, checkpoints, watch)
    main = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: main and main.cancel())
    try:
        with raising_first_cause():
            await actors.start()
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(actors.watch(), name="actors"),
                    tasks.create_task(_show(actors, watch), name="status"),
                ]
                await ring.run()
                for task in beside:
                    task.cancel()
    finally:
        await actors.stop()


async def _show(actors: RunActors, watch: Watch) -> None:
    """Keeps the live view current and records what the actors report."""
    async for _ in _ticks(STATUS_INTERVAL_S):
        status, events = await actors.status()
        watch.status(status)
        for event in events:
            watch.event(event)


async def _ticks(interval_s: float) -> AsyncIterator[None]:
    """One item every ``interval_s`` seconds: a sampling clock, not a wait for anything."""
    while True:
        yield
        await asyncio.sleep(interval_s)
