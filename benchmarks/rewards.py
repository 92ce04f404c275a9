r"""Short math answers in, checked answers per second out: in place on one core, and through one and two reward processes.

    python -m benchmarks.rewards [--quick] [--json FILE]

Kinds of answers that are decided by their text cost microseconds, so that the way to a process and back bounds them.
The others are parsed and compared by math-verify, which takes milliseconds, and are bounded by it: of ``mixed`` answers one
in ten is such a one, with a label that is asked about once. A process keeps the last 1,024 labels parsed, so that the
samples of one prompt share that half of the work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles.rollout.rm_hub.math import math
from miles.rollout.rm_hub.pool import ProcessScorer

TARGET = 2000
"""Short answers per second on two cores."""
PROCESSES = (1, 2)

Answer = tuple[str, str, float]
"""Reply, label, and the right verdict."""

TEXT: dict[str, Callable[[int], Answer]] = {
    "integer": lambda n: (rf"Adding both, we get \boxed{{{n}}}.", str(n), 1.0),
    "wrong integer": lambda n: (f"#### {n + 1}", str(n), 0.0),
    "fraction": lambda n: (rf"so the answer is $\frac{{{n}}}{{7}}$", f"{n}/7", 1.0),
    "decimal": lambda n: (rf"about \boxed{{{n}.5}}", f"{n}.50", 1.0),
    "same formula": lambda n: (rf"hence \boxed{{{n}\sqrt{{2}}}}", rf"${n}\sqrt{{2}}$", 1.0),
}
PARSED: dict[str, Callable[[int], Answer]] = {
    "formula in another form": lambda n: (rf"hence \boxed{{\sqrt{{2}}\cdot {n}}}", rf"${n}\sqrt{{2}}$", 1.0),
    "wrong formula": lambda n: (rf"hence \boxed{{{n + 1}\sqrt{{2}}}}", rf"${n}\sqrt{{2}}$", 0.0),
}


@dataclass(frozen=True)
class Rates:
    """Answers per second."""

    kind: str
    answers: int
    in_place: float
    one_process: float
    two_processes: float


def mixed(n: int) -> Answer:
    """Nine answers of the first kinds, then one of the others."""
    kinds = list((PARSED if n % 10 == 9 else TEXT).values())
    return kinds[n % len(kinds)](n)


def measure(kind: str, make: Callable[[int], Answer], count: int) -> Rates:
    """Raises AssertionError where a verdict is wrong: a fast wrong answer is no figure."""
    answers = [make(n) for n in range(1, count + 1)]
    start = time.perf_counter()
    scores = [math(reply, label) for reply, label, _ in answers]
    in_place = count / (time.perf_counter() - start)
    _check(answers, scores)
    one, two = (asyncio.run(_through_processes(answers, processes)) for processes in PROCESSES)
    return Rates(kind, count, in_place, one, two)


async def _through_processes(answers: Sequence[Answer], processes: int) -> float:
    scorer = ProcessScorer(processes=processes, timeout_s=60.0)
    try:
        await asyncio.gather(*(scorer.score("math", r"\boxed{\sqrt{3}}", r"\sqrt{5}") for _ in range(processes)))
        start = time.perf_counter()
        scores = await asyncio.gather(*(scorer.score("math", reply, label) for reply, label, _ in answers))
        elapsed = time.perf_counter() - start
    finally:
        await scorer.close()
    _check(answers, scores)
    return len(answers) / elapsed


def _check(answers: Sequence[Answer], scores: Sequence[object]) -> None:
    wrong = [(reply, label) for (reply, label, right), score in zip(answers, scores, strict=True) if score != right]
    assert not wrong, f"{len(wrong)} wrong verdicts, the first on {wrong[0]}"


def run(*, quick: bool) -> list[Rates]:
    scale = 20 if quick else 1
    math(r"\boxed{\sqrt{3}}", r"\sqrt{5}")
    return [
        measure("mixed", mixed, 4000 // scale),
        *(measure(kind, make, 4000 // scale) for kind, make in TEXT.items()),
        *(measure(kind, make, 400 // scale) for kind, make in PARSED.items()),
    ]


def table(rates: Sequence[Rates]) -> Table:
    shown = Table(title=f"math answers per second on {os.cpu_count()} cores (target {TARGET:,} through two processes)")
    shown.add_column("kind")
    for column in ("answers", "in place", "1 process", "2 processes"):
        shown.add_column(column, justify="right")
    for r in rates:
        shown.add_row(r.kind, *(f"{v:,.0f}" for v in (r.answers, r.in_place, r.one_process, r.two_processes)))
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description="checked math answers per second")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the answers: shows that it runs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="writes the figures there too")
    options = parser.parse_args(argv)
    rates = run(quick=options.quick)
    Console().print(table(rates))
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "rates": [asdict(r) for r in rates]}, indent=2))


if __name__ == "__main__":
    main()
