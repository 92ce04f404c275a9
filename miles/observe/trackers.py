"""Metrics go in by step, an experiment tracker's own files come out; trackers stand beside the run folder, never for it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from miles.config import Settings
from miles.config.owners import RunSettings
from miles.observe.run_folder import EVAL_STEP

TRAIN_AXIS = "train/step"
FINISH_TIMEOUT_S = 60.0
"""How long the end of a run waits for what wandb has not sent; it stays in wandb's files."""


class Tracker(Protocol):
    """Where metrics go besides the run folder. Whatever it raises, the run goes on without it."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training metrics come in increasing steps; ``eval/*`` ones have their own axis and come in any order."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes one event file into ``folder`` with tensorboard's own writer, which needs no torch.

    Each tag has its own axis there, so a late evaluation is kept. ``start_step`` (of a resumed run: the step it goes
    on after) hides what an earlier process wrote for later steps.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, start_step: int = 0, clock: Callable[[], float] = time.time) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._clock = clock
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if start_step:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=clock(), step=start_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=self._clock(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run with the settings as its config, its files in ``folder`` unless ``--wandb-dir`` says where.

    Training rows carry ``train/step``, evaluations ``eval/step``; each is the x-axis of its metrics, so that a late
    evaluation is kept. A resumed run goes on under the id that the folder keeps. Neither the command line nor the
    terminal is recorded: the key may stand there.
    """

    name = "wandb"

    def __init__(self, folder: Path, settings: RunSettings, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's reports of its own errors go out even offline
        import wandb

        mode: Any = settings.wandb_mode
        run_id = settings.wandb_run_id or _kept_id(folder / "wandb_id")
        files = Path(settings.wandb_dir or folder)
        files.mkdir(parents=True, exist_ok=True)
        group = settings.wandb_group
        if group and settings.wandb_random_suffix:
            group = f"{group}_{run_id}"
        self._eval_axis = TRAIN_AXIS if settings.wandb_always_use_train_step else EVAL_STEP
        quiet = wandb.Settings(console="off", silent=True, x_disable_meta=True, finish_timeout=FINISH_TIMEOUT_S)
        for name, value in (("api_key", settings.wandb_key), ("base_url", settings.wandb_host)):
            if value is not None:
                setattr(quiet, name, value)
        self._run = wandb.init(
            project=settings.wandb_project, entity=settings.wandb_team, group=group, name=group or folder.name,
            id=run_id, resume="allow", mode=mode, dir=files, config=dict(config),
            settings=quiet,
        )  # fmt: skip
        self._drawn: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        axis = self._eval_axis if all(name.startswith("eval/") for name in metrics) else TRAIN_AXIS
        for name in sorted(metrics.keys() - self._drawn):
            self._run.define_metric(name, step_metric=axis)
            self._drawn.add(name)
        self._run.log({axis: step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of a trackio project on this machine, named after the run folder; a resumed run goes on in it.

    Each row keeps the step that it belongs to, whenever it comes. Where the data lies is trackio's ``TRACKIO_DIR``.
    """

    name = "trackio"

    def __init__(self, folder: Path, settings: RunSettings, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            settings.trackio_project, name=folder.name, config=dict(config), resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def trackers_of(settings: Settings, folder: Path, start_step: int) -> dict[str, Callable[[], Tracker]]:
    """What opens each tracker that was asked for, by name; ``start_step`` is the step that a resumed run goes on after."""
    run, config = settings.run, settings.shown()
    events = folder / "tensorboard" / (run.tb_project_name or "") / (run.tb_experiment_name or "")
    openers: dict[str, tuple[bool, Callable[[], Tracker]]] = {
        TensorBoard.name: (run.use_tensorboard, lambda: TensorBoard(events, start_step)),
        Wandb.name: (run.use_wandb, lambda: Wandb(folder, run, config)),
        Trackio.name: (run.use_trackio, lambda: Trackio(folder, run, config)),
    }
    return {name: opened for name, (wanted, opened) in openers.items() if wanted}


def _kept_id(file: Path) -> str:
    """The id in ``file``; a new one where there is none."""
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text()
