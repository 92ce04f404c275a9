r"""Runs in virtual time, killed at every await point, resumed and audited: `python -m miles.sim.kill_points [--seeds A:B]`.

A run goes on its way once, and what is on disk is looked at after every step of every coroutine. What a resumed run does
follows from that alone, so points with the same files have the same future: each of those is resumed once, to the last
step, and audited. One in three of the resumed runs is killed again at a random point, and resumed from there.

The ledger is written up to `LAG` transitions late, as a writer thread may be; engines fail, responses differ in length,
the data has fewer prompts than the run trains, so that it goes through epochs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.config import Problems, Settings
from miles.config.flags import flag_fields
from miles.config.owners import RolloutSettings
from miles.driver.audit import Violation, audit
from miles.driver.checkpoints import CheckpointFolder, find_checkpoint
from miles.engine.fake import FakeEngine, Reset, Status
from miles.rollout.check import check as check_rollout
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.ledger import Ledger
from miles.rollout.ledger_store import FILE
from miles.rollout.lineage import StartingPoint
from miles.sim.clock import VirtualLoop
from miles.sim.control_plane import Simulation

STEPS, PROMPTS, LAG = 12, 20, 6
FLAGS = (
    f"--fully-async --num-rollout {STEPS} --rollout-batch-size 4 --n-samples-per-prompt 2 --max-weight-staleness 1 "
    "--rollout-retry-budget 1 --async-max-concurrent-samples 12 --rollout-shuffle --input-key prompt "
    "--rollout-max-response-len 120 --save-interval 5"
)
Files = dict[str, bytes]


@dataclass
class Tally:
    """What was tried: ``points`` where a kill is possible, ``states`` of the disk that differ, ``resumes`` run to the end."""

    points: int = 0
    states: int = 0
    resumes: int = 0
    kept: int = 0
    again: int = 0
    trained: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class WatchedLoop(VirtualLoop):
    """Tells after every step of every coroutine: the points at which a process can be killed, as disks see them."""

    def __init__(self, at_point: Any) -> None:
        super().__init__()
        self._at_point = at_point

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        def step() -> None:
            callback(*args)
            self._at_point()

        return super().call_soon(step, context=context)


class Disk:
    """The files of a run folder, looked at again where something was written."""

    def __init__(self, home: Path, simulation: Simulation) -> None:
        self._home = home
        self._simulation = simulation
        self._seen: Any = None
        self._last: Files = {}
        self.changed = False

    def look(self) -> Files:
        mark = self._mark()
        self.changed = mark != self._seen
        if self.changed:
            self._seen = mark
            self._last = {str(f.relative_to(self._home)): f.read_bytes() for f in self._files()}
        return self._last

    def _mark(self) -> Any:
        state = self._simulation.state
        changes = None if state is None else state.changes
        return changes, sorted((str(f), f.stat().st_size) for f in self._files())

    def _files(self) -> Iterator[Path]:
        return (f for f in self._home.rglob("*") if f.is_file() and not f.name.endswith(("-shm", ".lock")))


class Runs:
    """The runs of one policy and one seed, each in a folder of its own below ``place``."""

    def __init__(self, flags: str, seed: int, place: Path) -> None:
        self._place = place
        data = place / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(PROMPTS)))
        self._settings = settings_of(f"{FLAGS} {flags} --prompt-data {data} --rollout-seed {seed}")
        self._seed = seed
        self._count = 0

    def run(self, files: Files, look: Any) -> tuple[Simulation, Path]:
        """A run on a disk with ``files``, to its end; ``look(disk)`` is called at every point."""
        home = self._place / f"run-{self._count}"
        self._count += 1
        for name, content in files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(content)
        home.mkdir(exist_ok=True)
        (home / "settings.json").write_text(self._settings.to_json())
        simulation = self._simulation(home)
        disk = Disk(home, simulation)
        with asyncio.Runner(loop_factory=lambda: WatchedLoop(lambda: look(disk))) as runner:
            runner.run(simulation.run())
        return simulation, home

    def _simulation(self, home: Path) -> Simulation:
        found = find_checkpoint(str(home))
        begins = StartingPoint(found.step, found.version, found.folder) if found else StartingPoint()
        return Simulation(
            self._settings,
            {f"http://engine{i}:1": FakeEngine(choose=self._choose, length=_length) for i in range(2)},
            source=RolloutDataSourceWithBuffer(self._settings.namespace()),
            home=home,
            begins=begins,
            checkpoints=CheckpointFolder(home / "checkpoints"),
            lag=1 + self._seed % LAG,
        )

    def _choose(self, payload: dict[str, Any]) -> Any:
        luck = random.Random(f"{self._seed} {payload['sampling_params']['sampling_seed']}").random()
        return Status(500) if luck < 0.1 else Reset() if luck < 0.2 else None


def _length(payload: dict[str, Any], rng: random.Random) -> int:
    return 1 + int(rng.lognormvariate(2.5, 1.3))


def settings_of(flags: str) -> Settings:
    """Raises SettingsError where the rollout side can't run so."""
    problems = Problems()
    settings = Settings.parse(flags.split(), problems)
    check_rollout(settings, problems)
    problems.raise_all()
    return settings


def policies() -> list[str]:
    """The flags of every staleness policy that settings accept."""
    choices = next(f for f in flag_fields(RolloutSettings) if f.name == "staleness_policy").metadata["choices"]
    ways = [f"--staleness-policy {policy}" for policy in choices]
    ways.insert(1, f"{ways[0]} --async-unused-samples-handler retry")
    return [way for way in ways if _accepted(way)]


def _accepted(flags: str) -> bool:
    problems = Problems()
    check_rollout(Settings.parse([*FLAGS.split(), *flags.split()], problems), problems)
    return not problems.lines


def try_all(flags: str, seed: int, tally: Tally, *, every: int = 1) -> None:
    """Kills one run at every point (with ``every``: resumes only every so many states), adding up in ``tally``."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="miles-kill-", dir=shared if shared.is_dir() else None) as folder:
        runs = Runs(flags, seed, Path(folder))
        states: list[tuple[int, Files]] = [(0, {})]

        def look(disk: Disk) -> None:
            tally.points += 1
            files = disk.look()
            if disk.changed:
                states.append((tally.points, files))

        simulation, home = runs.run({}, look)
        _judge(simulation, home, f"{flags} --seeds {seed}, not killed", tally)
        tally.states += len(states)
        rng = random.Random(seed)
        for point, files in states[::every]:
            _resume(runs, files, f"{flags} --seeds {seed}, killed at point {point}", tally, rng, again=True)


def _resume(runs: Runs, files: Files, name: str, tally: Tally, rng: random.Random, *, again: bool) -> None:
    second: list[Files] = []
    left = rng.randrange(1, 3000) if again and rng.random() < 1 / 3 else 0

    def look(disk: Disk) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            second.append(disk.look())

    simulation, home = runs.run(files, look)
    tally.resumes += 1
    _judge(simulation, home, name, tally)
    for later in second:
        _resume(runs, later, name + ", and once more", tally, rng, again=False)


def _judge(simulation: Simulation, home: Path, name: str, tally: Tally) -> None:
    result = audit(home)
    violations = list(result.violations)
    if result.steps != STEPS:
        violations.append(Violation("steps", None, f"{result.steps} of {STEPS} steps were trained"))
    if simulation.state is not None:
        violations += _forgotten(simulation.state.ledger, home)
        tally.kept += len(simulation.state.recovered.kept)
        tally.again += len(simulation.state.recovered.again)
    tally.violations += [f"{name}: {v.law}: prompt {v.prompt} {v.what}" for v in violations]
    tally.trained += result.groups.get("trained", 0)
    tally.given_up.update({p: n for p, n in result.groups.items() if p.startswith("given_up")})
    shutil.rmtree(home)


def _forgotten(ledger: Ledger, home: Path) -> Iterator[Violation]:
    """Groups that are open on disk and that the run no longer knew at its end, or the other way round."""
    with closing(sqlite3.connect(home / FILE)) as connection:
        rows = dict(connection.execute("SELECT id, prompt FROM groups WHERE place IN ('issued', 'finished')"))
    for issue_id in rows.keys() ^ ledger.prompts_by_id().keys():
        yield Violation("once", rows.get(issue_id), f"group {issue_id} is open in the file or in the run, not in both")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.sim.kill_points", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--seeds", default="0:1", metavar="A:B", help="runs of seeds A to B - 1, for each policy")
    options = parser.parse_args(argv)
    first, end = map(int, options.seeds.split(":"))
    total, began = Tally(), time.monotonic()
    for flags in policies():
        tally = Tally()
        for seed in range(first, end):
            try_all(flags, seed, tally)
        sys.stdout.write(f"{flags}: {_line(tally)}\n")
        sys.stdout.flush()
        for name in ("points", "states", "resumes"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.violations += tally.violations
    sys.stdout.write(
        f"total: {total.points:,} kill points, {total.states:,} states of the disk, {total.resumes:,} resumed runs, "
        f"{len(total.violations)} violations, {time.monotonic() - began:.0f} s\n"
    )
    sys.stdout.writelines(f"  {line}\n" for line in total.violations)
    return 1 if total.violations else 0


def _line(tally: Tally) -> str:
    given_up = ", ".join(f"{n:,} {place}" for place, n in sorted(tally.given_up.items()))
    return (
        f"{tally.points:,} kill points, {tally.states:,} states, {tally.resumes:,} resumed runs: {tally.trained:,} groups "
        f"trained, {tally.kept:,} kept, {tally.again:,} issued again, {given_up or 'none given up'}; "
        f"{len(tally.violations)} violations"
    )


if __name__ == "__main__":
    sys.exit(main())
