"""Short ways to a run on the virtual clock: flags and fake engines in, the simulation that ran out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.config import Problems, Settings
from miles.driver.audit import audit
from miles.driver.checkpoints import CheckpointFolder, find_checkpoint
from miles.engine.fake import FakeEngine
from miles.rollout.lineage import StartingPoint
from miles.sim import clock
from miles.sim.control_plane import Record, Simulation
from miles.types import iter_samples

URLS = [f"http://engine{i}:1" for i in range(8)]


def settings_of(flags: str, program: Any = "train_async") -> Settings:
    problems = Problems()
    settings = Settings.parse(flags.split(), problems, program)
    problems.raise_all()
    return settings


def fleet_of(*engines: FakeEngine) -> dict[str, FakeEngine]:
    return dict(zip(URLS, engines, strict=False))


def simulation(flags: str, *engines: FakeEngine, program: Any = "train_async", **more: Any) -> Simulation:
    """A run that has not started; by default fully async, with one engine."""
    mode = "--fully-async " if program == "train_async" and "--one-step-off" not in flags else ""
    settings = settings_of(mode + flags.replace("--one-step-off", ""), program)
    return Simulation(settings, fleet_of(*(engines or (FakeEngine(),))), **more)


def simulate(flags: str, *engines: FakeEngine, **more: Any) -> Simulation:
    """The same, run to its end."""
    sim = simulation(flags, *engines, **more)
    clock.run(sim.run())
    return sim


def trained_prompts(sim: Simulation) -> list[int]:
    """The prompt number of every trained group, in the order of training."""
    return [next(iter_samples(g.samples)).group_index for b in sim.trainer.batches for g in b.groups]


def assert_every_prompt_is_accounted_for(sim: Simulation) -> None:
    """Each issued prompt is trained once, open, or given up with a reason; arrays per token fit."""
    counts = sim.rollouts.status()
    prompts = trained_prompts(sim)
    assert len(prompts) == len(set(prompts)), "a prompt was trained twice"
    given_up = sum(counts["given_up"].values())
    assert sim.issued == len(prompts) + given_up + counts["outstanding_groups"]
    for batch in sim.trainer.batches:
        for group in batch.groups:
            for sample in iter_samples(group.samples):
                sample.validate()
                assert len(sample.rollout_log_probs) == sample.response_length


# ---- runs with a folder of their own, that end in the middle and go on


class Killed(Exception):
    """The end of a run that somebody kills."""


class KilledAfter(Record):
    """Ends a run after so many training steps; ``None``: never."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self._left = steps

    def step(self, step: int, metrics: Any) -> None:
        super().step(step, metrics)
        if step + 1 == self._left:
            raise Killed


def run_in(home: Path, flags: str, *engines: FakeEngine, killed_after: int | None = None, **more: Any) -> Simulation:
    """A run in a folder: it goes on from the newest complete checkpoint there, and writes its own."""
    found = find_checkpoint(str(home))
    begins = StartingPoint(found.step, found.version, found.folder) if found else StartingPoint()
    checkpoints = CheckpointFolder(home / "checkpoints")
    more = {"home": home, "begins": begins, "checkpoints": checkpoints, "record": KilledAfter(killed_after)} | more
    sim = simulation(flags, *engines, **more)
    home.mkdir(parents=True, exist_ok=True)
    (home / "settings.json").write_text(sim.settings.to_json())
    with suppress(Killed):
        clock.run(sim.run())
    return sim


def assert_audit_passes(home: Path) -> None:
    """Every law that `miles audit` knows."""
    assert audit(home).violations == []
