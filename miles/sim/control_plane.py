"""Settings, fake engines and a fake trainer in; a whole run on the virtual clock, and what it did, out.

The production classes run unchanged: source, admission, worker, buffer, ledger, publisher and ring. Only what would be a
socket, a process or a GPU is a fake that ships.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.config import Settings
from miles.driver.ring import Checkpoints, Ring, Schedule
from miles.engine.fake import FakeEngine, FakeFleet
from miles.errors import raising_first_cause
from miles.rollout.assembly import assemble, open_state
from miles.rollout.core import Encode, make_client
from miles.rollout.evaluation import EvalSet
from miles.rollout.ledger_store import PlaceStore
from miles.rollout.lineage import RolloutState, StartingPoint
from miles.rollout.rollouts import Rollouts
from miles.rollout.scoring import DirectScoring, Scoring
from miles.sim.trainer import DirectRollouts, FakeTrainer
from miles.types import Sample
from miles.weights.publish import Publisher


@dataclass
class CountingSource:
    """Prompts 0, 1, 2, ... of ``group_size`` samples each; ``prompt_ids`` are their tokens."""

    group_size: int
    issued: int = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self._group() for _ in range(num_samples)]

    def _group(self) -> list[Sample]:
        number, self.issued = self.issued, self.issued + 1
        return [
            Sample(group_index=number, index=number * self.group_size + i, prompt=str(number))
            for i in range(self.group_size)
        ]


@dataclass
class Record:
    """What a simulated run leaves: the metrics of each step, evaluations and waits, all in virtual time."""

    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    evaluations: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = metrics

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations[step] = metrics

    def doing(self, state: str) -> None:
        """Nobody looks on in virtual time."""

    def asked_for(self) -> bool:
        return False

    def begin(self, step: int) -> str:
        return f"step-{step}"

    def finish(self, step: int, version: int) -> None:
        """Nothing is written in virtual time."""


@dataclass
class Simulation:
    """One run. `run` drives it to its end; the parts stay reachable for whoever looks into it.

    With a ``home`` it keeps its ledger there, written ``lag`` transitions late, and begins where ``begins`` says.
    ``scoring`` comes in the place of ``reward`` and its ``answer_s`` seconds; ``encode`` makes prompts token ids.
    """

    settings: Settings
    engines: dict[str, FakeEngine]
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    reward: Callable[[Sample], Any] = lambda sample: float(sample.response_length % 2)
    answer_s: float = 0.0
    scoring: Scoring | None = None
    tokenizer: Any = None
    encode: Encode = lambda prompt, tools: [ord(c) for c in str(prompt)] or [0]
    eval_sets: Sequence[EvalSet] = ()
    source: Any = None
    home: Path | None = None
    begins: StartingPoint = StartingPoint()
    checkpoints: Checkpoints | None = None
    lag: int = 1
    record: Record = field(default_factory=Record)

    @property
    def issued(self) -> int:
        """Prompts drawn from the source."""
        return int(self.source.issued)

    async def run(self) -> Record:
        """Raises the first cause of whatever stopped the run."""
        rollouts = self.build()
        steps = self.settings.rollout.num_rollout or 0
        schedule = Schedule(
            start=self.begins.step,
            total=steps,
            version=self.begins.version - 1,
            publish_interval=self.settings.engine.update_weights_interval,
            eval_interval=self.settings.eval.eval_interval,
            eval_before=not self.settings.eval.skip_eval_before_train,
            save_interval=self.settings.checkpoint.save_interval,
        )
        ring = Ring(schedule, self.direct, self.trainer, self.checkpoints or self.record, self.record)
        try:
            with raising_first_cause():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(rollouts.run(), name="rollouts")
                    await ring.run()
                    rollouts.close()
        finally:
            if self.state is not None:
                self.state.ledger.store.close()
        return self.record

    def build(self) -> Rollouts:
        """The rollout side, with every engine in the table and none routed to yet."""
        self.source = self.source or CountingSource(self.settings.rollout.n_samples_per_prompt)
        self.fleet = FakeFleet(self.engines)
        client = make_client(self.settings, self.fleet)
        for url in self.engines:
            client.table.add(url)
        self.publisher = Publisher(client, pause_mode=self.settings.engine.pause_generation_mode)
        self.state = None if self.home is None else self._open_state(self.home)
        self.rollouts = assemble(
            self.settings,
            source=self.source,
            client=client,
            publisher=self.publisher,
            encode=self.encode,
            scoring=self.scoring or DirectScoring(self.reward, self.answer_s),
            tokenizer=self.tokenizer,
            eval_sets=self.eval_sets,
            steps=range(self.begins.step, self.settings.rollout.num_rollout or 0),
            state_of_run=self.state,
        )
        self.direct = DirectRollouts(self.rollouts, self.state)
        self.trainer.rollouts = self.direct
        return self.rollouts

    def _open_state(self, home: Path) -> RolloutState:
        return open_state(
            self.settings, self.source, home, self.begins, lambda file: PlaceStore(file, self.lag), durable=False
        )
