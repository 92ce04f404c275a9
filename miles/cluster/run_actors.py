"""The actors of one run, started in order and ended in order: the two sides that the ring talks to.

start    rollout actor ─▶ trainer ranks and engines side by side ─▶ everything answers
stop     rollouts close ─▶ engines end ─▶ trainers end; each within what is left of the time limit
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from miles.cluster.actors import EngineActor, RolloutActor, TrainerActor
from miles.config import Settings
from miles.engine.backends import backend_of, weights_kind
from miles.errors import MilesError, WorkerDied
from miles.rollout.lineage import StartingPoint
from miles.types import Weights

SHARED_MEMORY = Path("/dev/shm")


class RunActors:
    """Rollout side and train side of the ring, over Ray: this run trains ``steps``, out of ``total_steps``."""

    def __init__(
        self,
        settings: Settings,
        *,
        home: Path,
        steps: range,
        total_steps: int,
        begins: StartingPoint,
        reference: str | None = None,
    ) -> None:
        self._settings = settings
        self._home = home.absolute()
        self._logs = self._home / "logs"
        self._steps = steps
        self._total_steps = total_steps
        self._begins = begins
        self._reference = reference
        self._rollouts: Any = None
        self._trainers: list[Any] = []
        self._engines: list[Any] = []
        self._backend = backend_of(settings.engine)
        self._weights_kind = weights_kind(settings.engine, self._backend)
        self._weights_folder = self._make_weights_folder()
        self._first_weights = str(Path(str(settings.model.hf_checkpoint)).absolute())

    def _make_weights_folder(self) -> Path:
        given = self._settings.engine.update_weight_disk_dir
        if self._weights_kind == "broadcast":
            return self._logs.parent
        if self._weights_kind == "disk":
            folder = (Path(given) if given else self._home / "weights").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        _sweep(place)
        return Path(tempfile.mkdtemp(prefix=f"miles-{os.getpid()}-", dir=place))

    # ---- start, run, stop

    async def start(self) -> None:
        """Starts every actor and waits until each answers. Raises the first failure."""
        settings = self._settings
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        gpus_per_engine = gpus * settings.engine.rollout_num_gpus_per_engine if self._backend.uses_gpus else 0
        ranks = 0 if settings.debug.debug_rollout_only else settings.trainer_ranks
        self._rollouts = RolloutActor.remote(settings, self._backend, self._steps)
        env = {"env_vars": {"OMP_NUM_THREADS": str(settings.model.torch_threads)}}
        self._trainers = [
            TrainerActor.options(num_gpus=gpus, runtime_env=env).remote(settings, rank, ranks, self._total_steps)
            for rank in range(ranks)
        ]
        self._engines = [
            EngineActor.options(num_gpus=gpus_per_engine).remote(
                settings, self._backend, settings.model.hf_checkpoint, str(self._logs / f"engine-{i}.log")
            )
            for i in range(settings.num_engines)
        ]
        self._running = [engine.run.remote(self._rollouts) for engine in self._engines]
        address = await _answer(self._trainers[0].address.remote()) if ranks else ""
        await _all(
            self._rollouts.start.remote(str(self._home), self._begins),
            *(t.start.remote(address, self._begins.folder, self._reference) for t in self._trainers),
        )
        self._running.append(self._rollouts.run.remote())

    async def watch(self) -> None:
        """Returns when everything that runs beside the ring has ended. Raises the first failure of it."""
        await _all(*self._running)

    async def stop(self) -> None:
        """Ends everything in order. What does not end in time is ended by force when Ray goes down."""
        try:
            async with asyncio.timeout(self._settings.run.shutdown_timeout_s):
                for calls in (
                    [self._rollouts.close.remote()] if self._rollouts is not None else [],
                    [e.stop.remote() for e in self._engines],
                    [t.close.remote() for t in self._trainers],
                ):
                    await asyncio.gather(*(_answer(c) for c in calls), return_exceptions=True)
        except TimeoutError:
            pass
        finally:
            if self._weights_kind == "shm":
                shutil.rmtree(self._weights_folder, ignore_errors=True)

    # ---- the rollout side of the ring

    async def take_batch(self, step: int) -> tuple[Any, dict[str, float]]:
        """A reference to the batch's columns, which only trainers fetch, and the metrics of its samples."""
        data, metrics = self._rollouts.take_batch.options(num_returns=2).remote(step)
        return data, await _answer(metrics)

    async def commit(self) -> None:
        await _answer(self._rollouts.commit.remote())

    async def busy_weights(self) -> frozenset[str]:
        answer: frozenset[str] = await _answer(self._rollouts.busy_weights.remote())
        return answer

    async def publish(self, weights: Weights, steps_due: int) -> None:
        await _answer(self._rollouts.publish.remote(weights, steps_due))

    async def evaluate(self, step: int) -> dict[str, float]:
        answer: dict[str, float] = await _answer(self._rollouts.evaluate.remote(step))
        return answer

    async def covered(self, step: int) -> None:
        await _answer(self._rollouts.covered.remote(step))

    async def status(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The rollout side's status and the events since the last call."""
        answer: tuple[dict[str, Any], list[dict[str, Any]]] = await _answer(self._rollouts.status.remote())
        return answer

    # ---- the train side of the ring

    async def train(self, data: Any, step: int) -> dict[str, float]:
        results: list[dict[str, float]] = await _all(*(t.train.remote(data, step) for t in self._trainers))
        return results[0] if results else {}

    async def write_weights(self, version: int, busy: frozenset[str]) -> Weights:
        """The trainer's weights; where nothing trains, those that the run starts from."""
        if not self._trainers:
            return Weights(version, "disk", self._first_weights)
        folder = str(self._weights_folder)
        results: list[Weights] = await _all(
            *(t.write_weights.remote(version, folder, busy, self._weights_kind) for t in self._trainers)
        )
        return results[0]

    async def save(self, step: int, folder: str) -> None:
        """Trainer, data cursor and ledger into ``folder``; the HF export where ``--save-hf`` says."""
        checkpoint = self._settings.checkpoint
        await _all(*(t.save.remote(folder, optimizer=not checkpoint.no_save_optim) for t in self._trainers))
        await _answer(self._rollouts.save.remote(step, folder))
        if checkpoint.save_hf is not None:
            target = checkpoint.save_hf.replace("{rollout_id}", str(step))
            os.makedirs(target, exist_ok=True)
            await _all(*(t.export_hf.remote(target) for t in self._trainers))


def _sweep(place: Path) -> None:
    """Removes what runs left that were killed before they could."""
    for folder in place.glob("miles-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


async def _answer(call: Awaitable[Any]) -> Any:
    """What an actor answers. Raises the error that it raised, or `WorkerDied` where the actor itself is gone."""
    try:
        return await call
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, MilesError) else error) from None
    except RayError as error:
        raise WorkerDied(f"an actor died: {error}") from error


async def _all(*calls: Awaitable[Any]) -> list[Any]:
    """Every answer, or the first failure at once."""
    return await asyncio.gather(*(_answer(c) for c in calls))
