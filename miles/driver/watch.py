"""What the ring and the actors do goes in, steps, events and snapshots for the observer come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.config import Settings
from miles.observe.observer import Observer
from miles.observe.snapshot import HeldBy, Snapshot, TrainerState

HELD_BY: dict[str, HeldBy] = {
    "start": "nothing",
    "end": "nothing",
    "slots": "slots",
    "credit": "credit",
    "ahead": "credit",
    "buffer": "buffer",
    "evaluation": "evaluation",
    "weights": "engines",
}


class Watch:
    """The ring's `Watcher`: counts steps from 1, as people do, and keeps what the live view shows between them."""

    def __init__(self, observer: Observer, settings: Settings) -> None:
        self._observer = observer
        self._settings = settings
        self._trainer: TrainerState = "waiting"
        self._rates: tuple[float | None, float | None] = (None, None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = max(metrics["perf/step_time"], 1e-9)
        trained = metrics.get("perf/train_tokens", 0.0)
        sampled = metrics.get("rollout/response_len/mean", 0.0) * self._settings.batch_samples
        generating, training = sampled / seconds, trained / max(metrics["perf/train_time"], 1e-9)
        self._rates = (generating, training)
        engines, ranks = self._settings.num_engines, self._settings.trainer_ranks
        rates = {"perf/tokens_per_gpu_per_sec": generating / engines} if engines else {}
        if trained:
            rates["perf/actor_train_tok_per_s"] = training / ranks
        self._observer.step(step + 1, {**metrics, **rates})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._observer.evaluation(step, metrics)

    def doing(self, state: TrainerState) -> None:
        self._trainer = state

    def event(self, event: Mapping[str, Any]) -> None:
        """Something that an actor reports, with its ``kind``."""
        self._observer.event(**event)

    def status(self, status: Mapping[str, Any]) -> None:
        """The rollout side's own status, made a snapshot."""
        engines = status["engines"]
        serving = sum(e["aside"] is None for e in engines)
        held = HELD_BY.get(status["generation_waits_for"], "nothing")
        self._observer.status(
            Snapshot(
                trainer=self._trainer,
                held_by=held if serving or not engines else "engines",
                version=status["version"],
                running_samples=status.get("running_samples", 0),
                slots=self._settings.slots,
                buffered_groups=status.get("buffer_groups", 0),
                buffer_capacity=status.get("buffer_capacity", self._settings.buffer_groups),
                engines_serving=serving,
                engines=len(engines),
                engine_tokens_per_s=self._rates[0],
                trainer_tokens_per_s=self._rates[1],
            )
        )
