"""A seed in, a run with faults out, and the laws that every such run keeps.

    python -m miles.sim.laws --seeds 10000 [--first SEED]

A seed is a whole scenario: mode, sizes, bound and policy, how fast engines and trainer are, what breaks and when, and
whether somebody ends the run in the middle. `check` runs it and raises `LawBroken`, naming the seed, where a law does not
hold: nothing lost, nothing trained twice, no trained token too old, sizes within their bounds, no idle slot that a start
could fill, an end in bounded time, and a cause where there is no result.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from typing import Any, Literal

from miles.config import Settings
from miles.engine.fake import Action, FakeEngine, Hang, Reset, Say, Status
from miles.errors import MilesError, Stalled
from miles.rollout.evaluation import EvalSet
from miles.rollout.feed import WorkerFeed
from miles.sim import clock
from miles.sim.control_plane import Simulation
from miles.sim.trainer import FakeTrainer
from miles.types import Sample, iter_samples

TIMEOUT_S = 600.0
OUTAGE_S = 30.0
STEP_LIMIT_S = 10 * TIMEOUT_S


class LawBroken(AssertionError):
    """A law does not hold. ``seed`` makes it happen again."""

    def __init__(self, seed: int, law: str, scenario: object) -> None:
        super().__init__(f"seed {seed}: {law}; {scenario}")
        self.seed = seed


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for. ``hopeless``: no engine ever answers well; ``ended_at_s``: the run is cancelled then."""

    seed: int
    program: Literal["train", "train_async"]
    options: Mapping[str, Any]
    hopeless: bool
    ended_at_s: float | None

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(seed)
        pick = rng.choice
        hopeless = rng.random() < 0.05
        batch, n = pick((1, 2, 4)), pick((1, 2, 4))
        mode = pick(("sync", "one_step_off", *["fully_async"] * 6))
        options = {
            "fully_async": mode == "fully_async",
            "rollout_batch_size": batch,
            "n_samples_per_prompt": n,
            "num_rollout": pick((2, 5, 14)),
            "rollout_max_response_len": 64,
            "update_weights_interval": pick((1, 1, 3)),
            "pause_generation_mode": pick(("retract", "in_place")),
            "async_max_concurrent_samples": n * pick((1, batch, 6 * batch)) + pick((0, 0, 1)),
            "async_data_buffer_capacity_factor": pick((1, 2, 4)),
            "rollout_submission_granularity": pick(("sample", "group")),
            "staleness_policy": pick(("evict", "wait", "mask")),
            "max_weight_staleness": pick((None, 0, 1, 2, 4, 8)),
            "async_unused_samples_handler": pick(("drop", "retry")),
            "rollout_retry_budget": pick((0, 1, 2)),
            "rollout_sample_timeout_s": TIMEOUT_S,
            "rollout_failure_limit": 3 if hopeless else 100_000,
            "engine_wait_s": 2 * OUTAGE_S,
            "partial_rollout": rng.random() < 0.3,
            "rollout_partial_groups": rng.random() < 0.2,
            "eval_interval": pick((None, None, 1, 3)),
            "eval_max_response_len": 8,
        }
        program: Literal["train", "train_async"] = "train" if mode == "sync" else "train_async"
        return cls(seed, program, options, hopeless, rng.uniform(0, 20) if rng.random() < 0.15 else None)

    @property
    def settings(self) -> Settings:
        return replace(Settings.from_namespace(argparse.Namespace(**self.options)), program=self.program)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``error`` None is the last step; ``digest`` is of everything that happened, with its times."""

    error: MilesError | None
    digest: str
    sim: Simulation


def check(seed: int) -> Outcome:
    """Runs the scenario of a seed. Raises `LawBroken`."""
    scenario = Scenario.of(seed)
    sim = _simulation(scenario)
    laws = _Laws(scenario, sim)
    error: MilesError | None = None
    try:
        clock.run(_run(scenario, sim, laws), laws.at_rest)
    except Stalled as stalled:
        laws.broken(str(stalled))
    except MilesError as failed:
        error = failed
    laws.at_end(error)
    return Outcome(error, laws.digest(), sim)


def _simulation(scenario: Scenario) -> Simulation:
    rng = random.Random(scenario.seed + 1)
    engines = {f"http://engine{i}:1": _engine(rng, scenario.hopeless) for i in range(rng.choice((1, 2, 3)))}
    held_out = [[Sample(index=-1 - i, prompt=f"e{i}")] for i in range(3)]
    return Simulation(
        scenario.settings,
        engines,
        FakeTrainer(
            step_s=rng.choice((0.0, 0.3, 2.0)), token_s=rng.choice((0.0, 0.01)), write_s=rng.choice((0.0, 0.2))
        ),
        answer_s=rng.choice((0.0, 0.0, 0.1)),
        eval_sets=[EvalSet("held_out", held_out)],
    )


def _engine(rng: random.Random, hopeless: bool) -> FakeEngine:
    bad: tuple[Action | None, ...] = (
        Reset(), Status(503), Status(500), Status(400), Hang(), Say(3, "abort"), Say(0, "abort"), Say(0), Say(64, "length"),
    )  # fmt: skip
    often = rng.choice((0.0, 0.0, 0.05, 0.3))
    script = deque(rng.choice(bad) if rng.random() < often else None for _ in range(60))
    tail = rng.choice((1, 4))

    def choose(payload: dict[str, Any]) -> Action | None:
        if hopeless:
            return Status(500)
        return script.popleft() if script else None

    return FakeEngine(
        dead=hopeless and rng.random() < 0.5,
        choose=choose,
        length=lambda payload, drawn: 1 + int(60 * drawn.random() ** tail),
        token_s=rng.choice((0.01, 0.05, 0.2)),
        prefill_s=rng.choice((0.0, 0.01)),
        saturation=rng.choice((4.0, 16.0, float("inf"))),
        tells_spans=rng.random() < 0.8,
        update_s=rng.choice((0.0, 0.1)),
        refuse_after_update_s=rng.choice((0.0, 0.0, 2.0)),
        health=deque(rng.choices((200, 503), k=3)),
    )


async def _run(scenario: Scenario, sim: Simulation, laws: _Laws) -> None:
    rng = random.Random(scenario.seed + 2)
    loop = asyncio.get_running_loop()
    for engine in list(sim.engines.values())[: 3 if rng.random() < 0.1 else 1]:
        if rng.random() < 0.3 and not scenario.hopeless:
            dies = rng.uniform(0, 10)
            loop.call_later(dies, engine.kill)
            loop.call_later(dies + rng.uniform(0.1, OUTAGE_S), engine.revive)
    run = asyncio.create_task(sim.run())
    await asyncio.wait([run], timeout=scenario.ended_at_s or STEP_LIMIT_S * (sim.settings.rollout.num_rollout or 0))
    if not run.done():
        if scenario.ended_at_s is None:
            laws.broken(f"the run has not ended after {loop.time():g} s")
        run.cancel()
        await asyncio.wait([run], timeout=1.0)
        laws.ended_early(run)
    elif run.exception() is not None:
        run.result()


class _Laws:
    def __init__(self, scenario: Scenario, sim: Simulation) -> None:
        self._scenario = scenario
        self._sim = sim
        self._early = False
        self._evicted = 0
        self._full_with: int | None = None
        self._taken = 0
        self._seen = blake2s()

    def broken(self, law: str) -> None:
        raise LawBroken(self._scenario.seed, law, self._scenario)

    def at_rest(self, now: float) -> None:
        """Before the clock moves: sizes are within their bounds, and nothing waits that could start."""
        feed = getattr(getattr(self._sim, "rollouts", None), "feed", None)
        if not isinstance(feed, WorkerFeed):
            return
        status, settings = self._sim.rollouts.status(), self._sim.settings
        engines = [(e["version"], e["running"]) for e in status.pop("engines")]
        self._seen.update(repr((now, sorted(status.items(), key=str), engines)).encode())
        self._evicted = feed.evicted
        if status["running_samples"] > settings.slots:
            self.broken(f"{status['running_samples']} samples run in {settings.slots} slots")
        untaken, taken = self._sim.rollouts.untaken, self._sim.rollouts.taken
        if status["buffer_groups"] < settings.buffer_groups or taken != self._taken:
            self._full_with, self._taken = None, taken
        if self._full_with is not None and untaken > self._full_with:
            self.broken(f"the buffer is full and {untaken} groups are on their way, after {self._full_with}")
        if status["buffer_groups"] >= settings.buffer_groups:
            self._full_with = untaken
        if status["generation_waits_for"] == "start" and self._sim.rollouts.generating:
            self.broken(f"at {now:g} s a group may start and doesn't")

    def ended_early(self, run: asyncio.Task[Any]) -> None:
        self._early = True
        left = [t.get_name() for t in asyncio.all_tasks() if t not in (run, asyncio.current_task())]
        if not run.done() or left:
            self.broken(f"one second after its end was asked for, there still run: {', '.join(left) or 'run'}")

    def at_end(self, error: MilesError | None) -> None:
        sim, counts = self._sim, self._sim.rollouts.status()
        prompts = [next(iter_samples(g.samples)).group_index for b in sim.trainer.batches for g in b.groups]
        twice = [p for p, times in Counter(prompts).items() if times > 1]
        given_up = sum(counts["given_up"].values())
        open_groups = counts["outstanding_groups"] - (len(prompts) - counts["trained_groups"])
        if twice:
            self.broken(f"prompts {twice} were trained twice")
        if sim.issued != len(prompts) + given_up + open_groups:
            self.broken(f"{sim.issued} issued, {len(prompts)} trained, {given_up} given up, {open_groups} open")
        for batch in sim.trainer.batches:
            for group in batch.groups:
                for sample in iter_samples(group.samples):
                    sample.validate()
                tokens = [s.trainable_tokens().total() for s in iter_samples(group.samples)]
                if any(s.response_length for s in iter_samples(group.samples)) and not any(tokens):
                    self.broken(f"group {group.issue_id} was trained with nothing left of it")
        bound = sim.settings.staleness_bound
        if bound is not None and max(sim.trainer.ages(), default=0) > bound:
            self.broken(f"a token of age {max(sim.trainer.ages())} was trained")
        if sim.settings.staleness_policy == "wait" and self._evicted:
            self.broken(f"{self._evicted} groups got too old under wait")
        steps = sim.settings.rollout.num_rollout or 0
        if error is not None:
            if not self._scenario.hopeless or not str(error):
                self.broken(f"the run failed: {error}")
        elif not self._early and (self._scenario.hopeless or len(sim.trainer.batches) != steps):
            self.broken(f"{len(sim.trainer.batches)} of {steps} steps were trained, and no cause was told")

    def digest(self) -> str:
        """Of the state at every moment, and of all that was trained."""
        for batch in self._sim.trainer.batches:
            for group in batch.groups:
                rows = [
                    (s.index, s.tokens, s.version_spans, s.loss_mask, s.reward) for s in iter_samples(group.samples)
                ]
                self._seen.update(repr((batch.step, batch.version, group.issue_id, rows)).encode())
        return self._seen.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.sim.laws", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(argv)
    started, ends, broken = time.monotonic(), Counter[str](), 0
    for seed in range(args.first, args.first + args.seeds):
        try:
            outcome = check(seed)
            ends["failed with its cause" if outcome.error else "ended"] += 1
        except LawBroken as law:
            broken += 1
            print(law)
    print(f"{args.seeds} seeds in {time.monotonic() - started:.0f} s: {dict(ends)}, {broken} broke a law")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
