"""Sizes in, seconds and memory of a start on large prompt files out: `python -m benchmarks.data [--quick] [--json]`.

Each format is measured in a process of its own, which does what a start does: it checks the settings (rows are read),
opens the prompts and draws the first shuffled batch. Writing the files is not part of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles.config import Problems, Settings
from miles.data.check import check
from miles.data.prompts import PromptSource

ROWS, QUICK_ROWS = 2_000_000, 20_000
BLOCK_ROWS = 100_000
FIRST_BATCH, LATER_DRAWS = 512, 20_000
LIMITS = {"start_s": 5.0, "rss_mb": 1000.0}
"""A start on `ROWS` rows stays below these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows in the place of {ROWS:,}")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure)))
        return
    rows = QUICK_ROWS if options.quick else ROWS
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        results = {path.suffix[1:]: measure_apart(path) for path in write(Path(folder), rows)}
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows, "limits": LIMITS, **results}) + "\n")
        return
    for name, result in results.items():
        sys.stdout.write(
            f"{name:8} {rows:,} rows, {result['file_mb']:.0f} MB: start {result['start_s']:.2f} s "
            f"({result['start_cpu_s']:.2f} s of CPU, imports included), "
            f"{result['rss_mb']:.0f} MB resident, then {result['draws_per_s']:,.0f} draws/s\n"
        )


def measure_apart(path: Path) -> dict[str, float]:
    """`measure` in a new process, so that its memory is its own."""
    command = [sys.executable, "-m", "benchmarks.data", "--measure", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout), file_mb=path.stat().st_size / 1e6)


def measure(path: str) -> dict[str, float]:
    """Seconds from the settings to the first batch, the most memory up to the last draw, and draws per second after it.

    Seconds of CPU include the imports.
    """
    began = time.perf_counter()
    problems = Problems()
    flags = f"--prompt-data {path} --input-key prompt --label-key label --apply-chat-template"
    more = f" --rollout-shuffle --num-epoch 1 --rollout-batch-size {FIRST_BATCH}"
    settings = Settings.parse((flags + more).split(), problems)
    check(settings, problems)
    problems.raise_all()
    prompts = PromptSource.from_settings(settings)
    prompts.take(FIRST_BATCH)
    started, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(LATER_DRAWS):
        prompts.next_prompt()
    drawn = time.perf_counter()
    return {
        "start_s": started - began,
        "start_cpu_s": cpu_s,
        "rss_mb": peak_rss_mb(),
        "draws_per_s": LATER_DRAWS / (drawn - started),
    }


def peak_rss_mb() -> float:
    """The most memory that was resident; unlike that of getrusage, without what the parent had before the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def write(folder: Path, rows: int) -> list[Path]:
    """The same rows as JSONL and as Parquet, in row groups as large as pyarrow writes them unless told otherwise."""
    jsonl, parquet = folder / "prompts.jsonl", folder / "prompts.parquet"
    tables = []
    with open(jsonl, "w") as lines:
        for start in range(0, rows, BLOCK_ROWS):
            block = [_row(i) for i in range(start, min(start + BLOCK_ROWS, rows))]
            lines.writelines(json.dumps(row) + "\n" for row in block)
            tables.append(pa.Table.from_pylist(block))
    pq.write_table(pa.concat_tables(tables), parquet)
    return [jsonl, parquet]


def _row(i: int) -> dict[str, Any]:
    question = f"Problem {i}: a train leaves at {i % 24}:{i % 60:02} and covers {i * 7919 % 100_003} metres. " * 3
    return {
        "prompt": [{"role": "user", "content": question}],
        "label": str(i * 31 % 9973),
        "metadata": {"source": "bench", "index": i},
    }


if __name__ == "__main__":
    main()
