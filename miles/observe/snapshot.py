"""One look at a running ring: the driver fills it in, the live view shows it and says who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrainerState = Literal["waiting", "training", "publishing", "evaluating", "saving"]
"""What the trainer does; "waiting": for a batch of rollouts."""

HeldBy = Literal["nothing", "slots", "credit", "buffer", "engines", "evaluation"]
"""What the next prompt waits for, in the words of admission; "nothing": it may start."""

_TRAINER: dict[TrainerState, str] = {
    "waiting": "trainer waits for rollouts",
    "training": "trainer trains",
    "publishing": "trainer publishes weights",
    "evaluating": "trainer waits for the evaluation",
    "saving": "trainer saves a checkpoint",
}
_ROLLOUTS: dict[HeldBy, str] = {
    "nothing": "rollouts run",
    "slots": "rollouts run in every slot",
    "credit": "new rollouts wait for new weights",
    "buffer": "new rollouts wait, the buffer is full",
    "engines": "rollouts wait for an engine",
    "evaluation": "new rollouts wait for the evaluation",
}


@dataclass(frozen=True)
class Snapshot:
    """The ring at one moment. Rates are over a recent window of the driver's choice; None: not known."""

    trainer: TrainerState
    held_by: HeldBy
    version: int
    """Weight version."""
    running_samples: int
    slots: int
    """Samples that may run at a time."""
    buffered_groups: int
    """Finished groups that wait for the trainer."""
    buffer_capacity: int
    """Groups from which on no new one starts."""
    engines_serving: int
    engines: int
    engine_tokens_per_s: float | None = None
    """Sampled tokens per second, all engines together."""
    trainer_tokens_per_s: float | None = None
    """Trained tokens per second, all ranks together."""


def who_waits(snapshot: Snapshot) -> str:
    """One line: what the trainer does, and what new rollouts wait for."""
    return f"{_TRAINER[snapshot.trainer]}; {_ROLLOUTS[snapshot.held_by]}"
