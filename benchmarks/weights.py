"""SmolLM2 in bf16 out of a trainer into engines that generate: how long it takes, and how long they stand still.

    python -m benchmarks.weights [--quick] [--model DIR] [--json FILE] [--plot FILE]

``publish_ms``: from the end of the optimizer step (float32 weights; the bf16 copy counts) to the last engine's
acknowledgement. ``stall_ms``: the longest time between two tokens of a request around an update, minus the median
under the same load. ``gb_per_s``: bf16 bytes over ``publish_ms``, beside a plain copy of as many bytes. Each way runs
against engines of its own, one thread each, with requests running all the time; medians over the updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from miles.engine.client import EngineClient
from miles.engine.http import HttpTransport
from miles.engine.local.model_config import ModelConfig
from miles.engine.local.weights import load_folder
from miles.engine.router import RoutingTable
from miles.train.segments import write_segment
from miles.train.sender import WeightSender, gather_buckets
from miles.types import Weights
from miles.weights.publish import Publisher

ROOT = Path(__file__).parents[1]
TARGETS = {"stall_ms_1": 30.0, "stall_ms_3": 60.0, "publish_ms": 150.0}
AROUND_S = 0.25
"""A token that was due this long before or after an update counts as around it."""
BUCKET_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Row:
    """One way, with so many engines. Milliseconds; ``stall_ms`` is the worst engine's of each update, then the median."""

    way: str
    engines: int
    publish_ms: float
    stall_ms: float
    median_gap_ms: float
    gb_per_s: float
    share_of_copy: float


class Engines:
    """Engines of the benchmark's own, with requests running on them."""

    def __init__(self, folder: Path, model: Path, count: int) -> None:
        self._files = [folder / f"steps-{i}" for i in range(count)]
        command = [sys.executable, "-m", "benchmarks.timed_engine"]
        flags = ["--model-path", str(model), "--port", "0", "--dtype", "bfloat16", "--max-total-tokens", "20000"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._processes = [
            subprocess.Popen([*command, str(file), *flags], stdout=subprocess.PIPE, text=True, env=env)
            for file in self._files
        ]
        self.urls = [(p.stdout.readline() if p.stdout else "").split()[-1] for p in self._processes]

    def ends(self) -> list[np.ndarray]:
        """When each step of each engine ended."""
        held = [np.memmap(file, dtype=np.float64, mode="r") for file in self._files]
        return [np.array(ends[1 : int(ends[0]) + 1]) for ends in held]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)


@contextmanager
def engines(model: Path, count: int) -> Iterator[Engines]:
    with tempfile.TemporaryDirectory() as folder:
        started = Engines(Path(folder), model, count)
        try:
            yield started
        finally:
            started.stop()


async def keep_busy(client: EngineClient, urls: Sequence[str], requests: int) -> None:
    """``requests`` on each engine at any time, until cancelled."""

    async def one(url: str) -> None:
        context = (await client.control(url, "/server_info", None, timeout_s=60))["context_length"]
        params = {"max_new_tokens": min(400, context - 8), "ignore_eos": True, "temperature": 1.0}
        while True:
            body = {"input_ids": [1] * 8, "sampling_params": params, "return_logprob": True}
            await client.control(url, "/generate", body, timeout_s=600)

    async with asyncio.TaskGroup() as tasks:
        for url in urls:
            for _ in range(requests):
                tasks.create_task(one(url))


def stall_ms(ends: np.ndarray, start: float, end: float) -> tuple[float, float]:
    """The longest gap around an update beyond the median one of the run, and that median."""
    gaps, after = np.diff(ends), ends[1:]
    around = (after > start - AROUND_S) & (after < end + AROUND_S)
    median = float(np.median(gaps))
    return (float(gaps[around].max()) - median) * 1e3, median * 1e3


Publish = Callable[[int], Awaitable[None]]


async def measure(
    way: str, urls: Sequence[str], running: Engines, publish_of: Callable[[EngineClient], Publish], updates: int,
    requests: int, nbytes: int, copy_gb_per_s: float,
) -> Row:  # fmt: skip
    client = EngineClient(RoutingTable(engine_wait_s=60), HttpTransport())
    for url in urls:
        client.table.add(url)
        client.table.restore(url, None)
    publish = publish_of(client)
    times: list[tuple[float, float]] = []
    load = asyncio.create_task(keep_busy(client, urls, requests))
    try:
        for version in range(1, updates + 3):
            await asyncio.sleep(1.5)
            start = time.monotonic()
            await publish(version)
            times.append((start, time.monotonic()))
            aside = [e.aside for e in client.table.aside()]
            assert not aside, aside
        await asyncio.sleep(0.5)
    finally:
        assert not load.done(), "the requests beside the updates failed"
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await client.close()
    ends = running.ends()
    measured = times[2:]  # the first two make their segments
    stalls = [max(stall_ms(e, *t)[0] for e in ends) for t in measured]
    publish_ms = statistics.median((b - a) * 1e3 for a, b in measured)
    speed = nbytes / publish_ms / 1e6
    gap = statistics.median(stall_ms(e, *measured[0])[1] for e in ends)
    return Row(way, len(urls), publish_ms, statistics.median(stalls), gap, speed, speed / copy_gb_per_s)


# ---- the ways


def over_publisher(write: Callable[[int, frozenset[str]], Weights]) -> Callable[[EngineClient], Publish]:
    """As a run does it: trainer side in a thread, then the publisher."""

    def make(client: EngineClient) -> Publish:
        publisher = Publisher(client, pause_mode="in_place")

        async def publish(version: int) -> None:
            await publisher.publish(await asyncio.to_thread(write, version, publisher.busy()))

        return publish

    return make


def over_object_store(tensors: dict[str, Tensor], folder: Path) -> Callable[[EngineClient], Publish]:
    """Through the Ray object store: put, got by another process, which writes it for an engine to load."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=2 * 1024**3)

    @ray.remote
    def unpack(arrays: dict[str, Any], target: str) -> str:
        save_file({n: torch.from_numpy(a).view(torch.bfloat16) for n, a in arrays.items()}, target)
        return str(Path(target).parent)

    def make(client: EngineClient) -> Publish:
        publisher = Publisher(client, pause_mode="in_place")

        def send(version: int) -> Weights:
            arrays = {n: t.bfloat16().view(torch.int16).numpy() for n, t in tensors.items()}
            target = folder / f"ray-{version % 2}" / "model.safetensors"
            target.parent.mkdir(exist_ok=True)
            return Weights(version, "disk", ray.get(unpack.remote(ray.put(arrays), str(target))))

        async def publish(version: int) -> None:
            await publisher.publish(await asyncio.to_thread(send, version))

        return publish

    return make


def write_folder(tensors: dict[str, Tensor], folder: Path, version: int) -> Weights:
    target = folder / f"disk-{version % 2}"
    target.mkdir(exist_ok=True)
    save_file({n: t.bfloat16() for n, t in tensors.items()}, target / "model.safetensors")
    return Weights(version, "disk", str(target))


def run(model: Path, *, quick: bool) -> tuple[list[Row], float]:
    """Every row, and the speed of a plain copy in GB/s."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        config = ModelConfig.read(model)
        tensors = sharded(load_folder(model, config, torch.float32))
        nbytes = sum(t.numel() * 2 for t in tensors.values())
        speed = copy_speed(nbytes)
        updates, requests = (2, 2) if quick else (8, 8)
        whole = {n: t.full_tensor() for n, t in tensors.items()}  # type: ignore[attr-defined]
        sender = WeightSender("127.0.0.1", torch.device("cpu"))
        ways: dict[str, Callable[[EngineClient], Publish]] = {
            "shared memory": over_publisher(
                lambda v, busy: write_segment(tensors, torch.bfloat16, v, folder / "shm", busy)
            ),
            "gloo broadcast": over_publisher(
                lambda v, _: sender.hold(v, gather_buckets(tensors, torch.bfloat16, BUCKET_BYTES))
            ),
            "safetensors": over_publisher(lambda v, _: write_folder(whole, folder, v)),
        }
        rows: list[Row] = []
        for count in (1,) if quick else (1, 3):
            for way, publish_of in ways.items():
                rows.append(_row(way, model, count, publish_of, updates, requests, nbytes, speed))
        if not quick:
            publish_of = over_object_store(whole, folder)
            rows.append(_row("Ray object store", model, 1, publish_of, updates, requests, nbytes, speed))
        sender.close()
        dist.destroy_process_group()
    return rows, speed


def _row(
    way: str, model: Path, count: int, publish_of: Callable[[EngineClient], Publish], updates: int, requests: int,
    nbytes: int, speed: float,
) -> Row:  # fmt: skip
    with engines(model, count) as running:
        return asyncio.run(measure(way, running.urls, running, publish_of, updates, requests, nbytes, speed))


def sharded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As FSDP2 holds them, on the one rank there is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights.items()}


def copy_speed(nbytes: int) -> float:
    """GB/s of a plain copy of as many bytes, by one thread."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times) / 1e9


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """What the targets are about: shared memory."""
    shared = {r.engines: r for r in rows if r.way == "shared memory"}
    found = {f"stall_ms_{n}": row.stall_ms for n, row in shared.items()}
    return found | {"publish_ms": max(r.publish_ms for r in shared.values()), "gb_per_s": shared[1].gb_per_s}


def table(rows: Sequence[Row], speed: float) -> Table:
    shown = Table(title=f"new weights into engines that generate; a plain copy makes {speed:.1f} GB/s")
    shown.add_column("way")
    for column in ("engines", "publish ms", "stall ms", "token every ms", "GB/s", "share of a copy", "x shared memory"):
        shown.add_column(column, justify="right")
    for r in rows:
        base = next(s.publish_ms for s in rows if s.way == "shared memory" and s.engines == r.engines)
        shown.add_row(
            r.way, str(r.engines), f"{r.publish_ms:.0f}", f"{r.stall_ms:.0f}", f"{r.median_gap_ms:.0f}",
            f"{r.gb_per_s:.2f}", f"{r.share_of_copy:.0%}", f"{r.publish_ms / base:.1f}",
        )  # fmt: skip
    return shown


def plot(rows: Sequence[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
    labels = [f"{r.way}, {r.engines}" for r in rows]
    for axis, title, values in (
        (axes[0], "publish, ms", [r.publish_ms for r in rows]),
        (axes[1], "stall, ms", [r.stall_ms for r in rows]),
    ):
        axis.barh(labels, values, color="#4c72b0")
        axis.invert_yaxis()
        axis.set_title(title)
    axes[1].set_yticklabels([])
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description="weights into engines")
    parser.add_argument("--quick", action="store_true", help="one engine, the quickstart model: shows that it runs")
    parser.add_argument(
        "--model", type=Path, help="model folder; SmolLM2 as examples/smollm2_arithmetic/prepare.py makes it"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="writes the figures there too")
    parser.add_argument("--plot", metavar="FILE", type=Path, default=Path("weights.png"), help="the PNG (%(default)s)")
    options = parser.parse_args(argv)
    model = options.model or ROOT / "examples" / "quickstart" / "model"
    if options.model is None and not options.quick:
        parser.error("--model is needed (a folder with SmolLM2), or --quick")
    rows, speed = run(model, quick=options.quick)
    Console(width=120).print(table(rows, speed))
    plot(rows, options.plot)
    found = figures(rows)
    for name, target in TARGETS.items():
        if name in found:
            sys.stdout.write(f"{name} {found[name]:.0f} (target {target:.0f})\n")
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "copy_gb_per_s": speed}
        options.json.write_text(json.dumps(machine | found | {"rows": [asdict(r) for r in rows]}, indent=2))


if __name__ == "__main__":
    main()
