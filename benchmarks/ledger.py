"""Groups in, what the ledger costs out: `python -m benchmarks.ledger [--quick] [--json]`.

transitions_per_s        issue, finish (with 8 samples of 512 tokens) and commit of groups, batch after batch, to disk
payload_ratio            bytes of such a payload / ids int32 + log-probs float32 + masks of one bit
mb_per_million_groups    the file after 10^6 groups were trained and covered by checkpoints
wall_share               what the rollout loop spends on it and a step waits for it / wall time, with the groups and
                         at the pace of the quickstart; cpu_share counts the writer's thread, which runs beside it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from miles.rollout.ledger import Ledger
from miles.rollout.ledger_store import FILE, LedgerFile, LedgerStore, ThreadStore
from miles.rollout.lineage import StartingPoint, go_back
from miles.rollout.payload import encode
from miles.rollout.staleness import finished_group
from miles.types import Batch, Group, Sample, Status, VersionSpan

BATCH, GROUPS, SAVE_EVERY = 32, 4000, 20
TARGETS = {"transitions_per_s": 3000.0, "wall_share": 0.02, "payload_ratio": 1.1}
QUICKSTART_STEP_S, QUICKSTART_TOKENS = 0.3, 7
"""The median step of the quickstart on two cores (32 groups of 8), and its mean response."""
WORDS = (
    "so",
    "the total",
    "is half",
    "of that",
    "and we get",
    "two more",
    "for each one",
    "then",
    "add",
    "them",
    "first",
)


def group_of(number: int, samples: int, tokens: int) -> Group:
    """Finished samples of one prompt with ids as of a vocabulary of 150,000, and text of four characters a token."""
    rng = random.Random(number)
    made = []
    for i in range(samples):
        sample = Sample(
            group_index=number, index=number * samples + i, prompt="What is half of it? " * 4, label="21",
            tokens=[rng.randrange(150_000) for _ in range(24)], status=Status.COMPLETED, submit_version=1, reward=1.0,
            response=" ".join(rng.choice(WORDS) for _ in range(tokens)),
        )  # fmt: skip
        ids = [int(rng.paretovariate(0.3)) % 150_000 for _ in range(tokens)]
        sample.append_response(ids, [-rng.expovariate(2.0) for _ in ids], [VersionSpan(1, 0, tokens)])
        made.append(sample)
    return made


@dataclass
class Cost:
    """Seconds: all of them, those that callers of the ledger spent in it or waited for it, those of CPU."""

    wall: float = 0.0
    waited: float = 0.0
    cpu: float = 0.0


async def _train(store: LedgerStore, groups: list[Group], count: int, pace_s: float = 0.0) -> Cost:
    """Trains ``count`` groups, whose batches finish over ``pace_s`` seconds each."""
    ledger = Ledger(window=256, store=store)
    finished = [finished_group(0, results) for results in groups]
    cost, began, cpu = Cost(), time.perf_counter(), time.process_time()
    for step in range(count // BATCH):
        batch = []
        for i in range(BATCH):
            which = finished[(step * BATCH + i) % len(groups)]
            called = time.perf_counter()
            group = ledger.issue(which.samples)
            ledger.finish(group, which.samples)
            cost.waited += time.perf_counter() - called
            batch.append(replace(which, issue_id=group.issue_id))
            if pace_s:
                await asyncio.sleep(pace_s / BATCH)
        called = time.perf_counter()
        ledger.take(g.issue_id for g in batch)
        ledger.commit(Batch(step, 1, tuple(batch)))
        await store.settle()
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            ledger.covered(step + 1)
        cost.waited += time.perf_counter() - called
    await store.settle()
    cost.wall, cost.cpu = time.perf_counter() - began, time.process_time() - cpu
    return cost


def _cost(folder: Path, groups: list[Group], count: int, pace_s: float = 0.0) -> Cost:
    async def run() -> Cost:
        store = ThreadStore(_new(folder))
        cost = await _train(store, groups, count, pace_s)
        store.close()
        return cost

    return asyncio.run(run())


def measure_rate(folder: Path, count: int) -> float:
    return 3 * count / _cost(folder / "rate", [group_of(i, 8, 512) for i in range(32)], count).wall


def measure_share(folder: Path, steps: int) -> tuple[float, float]:
    """Wall time and CPU time that the quickstart would spend on it, both as shares of its wall time."""
    groups = [group_of(i, 8, QUICKSTART_TOKENS) for i in range(64)]
    cost = _cost(folder / "share", groups, steps * BATCH, QUICKSTART_STEP_S)
    return cost.waited / cost.wall, cost.cpu / cost.wall


def measure_ratio() -> float:
    ratios = []
    for number in range(8):
        samples = group_of(number, 8, 512)
        raw = sum(4 * len(s.tokens) + 4 * s.response_length + s.response_length / 8 for s in samples)
        payload = encode(samples)
        assert payload is not None
        ratios.append(len(payload) / raw)
    return sum(ratios) / len(ratios)


def measure_size(folder: Path, count: int) -> float:
    """MB of the file for each million groups, all of them trained and covered."""
    _cost(folder / "size", [group_of(i, 1, 4) for i in range(64)], count)
    return (folder / "size" / FILE).stat().st_size / count


def _new(folder: Path) -> LedgerFile:
    file = LedgerFile(folder / FILE)
    go_back(file, StartingPoint(), bound=None)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the groups: shows that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    options = parser.parse_args()
    scale = 10 if options.quick else 1
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as made:
        folder = Path(made)
        wall_share, cpu_share = measure_share(folder, 20 // scale)
        results = {
            "transitions_per_s": measure_rate(folder, GROUPS // scale),
            "wall_share": wall_share,
            "cpu_share": cpu_share,
            "payload_ratio": measure_ratio(),
            "mb_per_million_groups": measure_size(folder, 1_000_000 // (20 * scale)),
        }
    if options.json:
        sys.stdout.write(json.dumps({"targets": TARGETS, **results}) + "\n")
        return
    for name, value in results.items():
        sys.stdout.write(f"{name:24}{value:>12,.4g}\n")


if __name__ == "__main__":
    main()
