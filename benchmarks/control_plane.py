"""How many transitions of groups the control plane makes a second, and whether its memory stays flat.

    python -m benchmarks.control_plane [--groups N] [--quick] [--json FILE]

Groups of 8 samples go sample by sample through source, admission, worker, buffer, staleness policy and ledger, on the
virtual clock; sampling takes time there and nothing else. An event is one transition of a group: issued, finished,
filtered, retried, trained, given up. Seconds are CPU seconds of this process. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from miles.config import Problems, Settings
from miles.engine.fake import FakeFleet
from miles.rollout.assembly import make_client, make_worker_feed
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.feed import WorkerFeed
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.generation import GenerateState
from miles.rollout.ledger import Ledger, OpenGroup
from miles.rollout.scoring import DirectScoring
from miles.rollout.staleness import Versions
from miles.sim import clock
from miles.sim.control_plane import CountingSource
from miles.types import Group, Sample, VersionSpan

EVENTS_PER_S = 5_000
GROWTH_MB = 20
STEP_S = 0.5
FLAGS = (
    "--fully-async --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 64 "
    "--async-max-concurrent-samples 1024 --max-weight-staleness 2 --async-unused-samples-handler retry "
    "--custom-generate-function-path benchmarks.control_plane.sample "
    "--dynamic-sampling-filter-path benchmarks.control_plane.nine_in_ten"
)


async def sample(input: GenerateFnInput) -> Sample:
    """A response of four tokens; one in 64 takes several steps."""
    made, state = input.sample, input.state
    slow = (made.index or 0) * 0x9E3779B1 % 64 == 0
    await asyncio.sleep(STEP_S * (4 if slow else 0.5 + (made.index or 0) % 8 / 16))
    made.tokens = [1]
    made.append_response([1, 2, 3, 4], [-0.5] * 4, [VersionSpan(state.version, 0, 4)])
    made.status = Sample.Status.COMPLETED
    return made


def nine_in_ten(args: argparse.Namespace, group: Group) -> DynamicFilterOutput:
    return DynamicFilterOutput(group[0].group_index % 10 != 0, "tenth")


class CountingLedger(Ledger):
    """Counts what `counts()` doesn't tell: groups that finished, and those that were issued again."""

    finished = 0
    retried = 0

    def finish(self, group: OpenGroup, results: Group) -> None:
        self.finished += 1
        super().finish(group, results)

    def reissue(self, issue_id: int, version: int) -> OpenGroup:
        self.retried += 1
        return super().reissue(issue_id, version)

    def events(self) -> int:
        """Transitions so far."""
        counts = self.counts()
        return counts.issued + self.finished + self.retried + counts.trained + sum(counts.given_up.values())


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def drive(feed: WorkerFeed, ledger: CountingLedger, groups: int, memory: list[int]) -> None:
    """Trains until ``groups`` have been issued; notes the memory ten times after the first tenth."""
    step = 0
    async with asyncio.TaskGroup() as tasks:
        feed.raise_version(1)
        generation = tasks.create_task(feed.run())
        while (issued := ledger.counts().issued) < groups:
            await feed.take(step)
            await asyncio.sleep(STEP_S)
            step += 1
            feed.commit()
            feed.raise_version(step + 1)
            if issued > groups * (len(memory) + 1) / 10:
                memory.append(resident_bytes())
        generation.cancel()


def measure(groups: int) -> dict[str, float]:
    """Events per CPU second and megabytes of growth from a tenth of the way to its end."""
    settings = Settings.parse(FLAGS.split(), Problems())
    ledger, versions, memory = CountingLedger(window=1024), Versions(), []
    client = make_client(settings, FakeFleet({}))
    feed = make_worker_feed(
        settings,
        source=CountingSource(8),
        state=GenerateState(settings.namespace(), client, versions, lambda prompt, tools: [1]),
        scoring=DirectScoring(lambda made: 1.0),
        ledger=ledger,
        versions=versions,
        steps=None,
    )
    started = time.process_time()
    clock.run(drive(feed, ledger, groups, memory))
    taken = time.process_time() - started
    counts = ledger.counts()
    print(
        f"{counts.issued} issued, {ledger.finished} finished, {ledger.retried} retried, {counts.trained} trained, "
        f"given up {counts.given_up}; {taken:.1f} s"
    )
    return {"events_per_s": ledger.events() / taken, "rss_growth_mb": (memory[-1] - memory[0]) / 2**20}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="20,000 groups")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(argv)
    figures = measure(20_000 if args.quick else args.groups)
    print(f"{figures['events_per_s']:,.0f} events/s, memory grew by {figures['rss_growth_mb']:.1f} MB")
    if args.json:
        args.json.write_text(json.dumps(figures))
    return int(figures["events_per_s"] < EVENTS_PER_S or figures["rss_growth_mb"] > GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
