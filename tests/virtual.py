"""Short ways to a run on the virtual clock: flags and fake engines in, the simulation that ran out."""

from __future__ import annotations

from typing import Any

from miles.config import Problems, Settings
from miles.engine.fake import FakeEngine
from miles.sim import clock
from miles.sim.control_plane import Simulation
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
