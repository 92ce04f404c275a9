"""SGLang and vLLM from the outside, against a stub of each: exact command line and environment; start, update, sample."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from miles.cluster.actors import free_port
from miles.cluster.engine_process import EngineProcess
from miles.engine.backends import backend_of
from miles.engine.client import EngineClient
from miles.engine.http import HttpTransport
from miles.engine.router import RoutingTable
from miles.types import VersionSpan, Weights
from miles.weights.publish import Publisher
from tests.server_stub import make_interpreter, requests_of, started
from tests.virtual import settings_of

COMMANDS = {
    "sglang": (
        "-m sglang.launch_server --model-path MODEL --host 127.0.0.1 --port PORT --tp-size 2 --dtype bfloat16 "
        "--random-seed 42 --max-running-requests 8 --skip-server-warmup --context-length 99 --mem-fraction-static 0.7"
    ),
    "vllm": (
        "-m vllm.entrypoints.cli.main serve MODEL --host 127.0.0.1 --port PORT --tensor-parallel-size 2 "
        "--dtype bfloat16 --seed 42 --max-num-seqs 8 --logprobs-mode processed_logprobs "
        "--enable-prompt-tokens-details --max-model-len 99 --mem-fraction-static 0.7"
    ),
}
OWN_ENV = {
    "sglang": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
}
CALLS = {
    "sglang": [
        ("GET", "/model_info", None),
        ("POST", "/pause_generation", {"mode": "in_place"}),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/w/v3", "weight_version": "3", "flush_cache": False, "abort_all_requests": False},
        ),
        ("POST", "/continue_generation", {}),
    ],
    "vllm": [
        ("GET", "/weight_info", None),
        ("POST", "/pause?mode=keep&clear_cache=false", None),
        ("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w/v3"}}),
        ("POST", "/update_weight_version", {"new_version": "3"}),
        ("POST", "/resume", None),
    ],
}
FLAGS = (
    "--rollout-backend {} --engine-python {} --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --dtype bfloat16 "
    "--sglang-max-running-requests 8 --rollout-max-context-len 99 --pause-generation-mode in_place"
)
each_backend = pytest.mark.parametrize("name", ["sglang", "vllm"])


def process_of(settings, port, tmp_path):
    launch = backend_of(settings.engine).launch(
        settings, model="MODEL", port=port, extra=["--mem-fraction-static", "0.7"]
    )
    return EngineProcess(
        launch, f"http://127.0.0.1:{port}", tmp_path / "logs" / "engine.log",
        start_timeout_s=60.0, health_interval_s=60.0, health_timeout_s=60.0,
    )  # fmt: skip


def run_while_up(engine, scenario):
    """Starts the engine, runs ``scenario(url)`` once it is up, and ends it."""

    async def main():
        is_up = asyncio.Event()

        async def up(url):
            is_up.set()

        async def down(url, why):
            raise AssertionError(why)

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run(up, down))
            await is_up.wait()
            result = await scenario(engine.url)
            running.cancel()
        return result

    return asyncio.run(main())


def ends(pid, within_s):
    """Whether the process is gone, or goes in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


@pytest.mark.slow
@each_backend
def test_a_server_is_started_registered_updated_and_sampled_from(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    python = make_interpreter(tmp_path / "env", name)
    settings = settings_of(FLAGS.format(name, python))
    port = free_port()

    async def scenario(url):
        transport = backend_of(settings.engine).adapt(HttpTransport())
        client = EngineClient(RoutingTable(engine_wait_s=60), transport)
        publisher = Publisher(client, pause_mode=settings.engine.pause_generation_mode)
        async with asyncio.TaskGroup() as tasks:
            recovery = tasks.create_task(publisher.run())
            await publisher.publish(Weights(3, "disk", "/w/v3"))
            client.table.add(url)
            await client.table.changes.wait_until(lambda: bool(client.table.routed()))
            reply = await client.generate([5, 6], {"max_new_tokens": 4}, request_id="r", submit_version=2)
            recovery.cancel()
        await client.close()
        return reply

    reply = run_while_up(process_of(settings, port, tmp_path), scenario)
    was = started(python)
    assert was["argv"] == COMMANDS[name].replace("PORT", str(port)).split()
    assert OWN_ENV[name].items() <= was["env"].items()
    assert was["env"]["PATH"].split(os.pathsep)[0] == str(python.parent)
    assert "PYTHONPATH" not in was["env"]
    assert requests_of(python)[:-1] == CALLS[name]
    assert (reply.ids, reply.log_probs, reply.text, reply.finish) == ([7, 8], [-0.5, -0.25], "ab", "stop")
    assert reply.spans == [VersionSpan(2, 0, 2)], "what the server can't tell per token is as old as its submission"
    assert ends(was["worker"], within_s=10), "a worker process of the server lives on"


@pytest.mark.slow
def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path):
    """Its owner can't end it any more; the kernel does."""
    python = make_interpreter(tmp_path / "env", "sglang")
    port = free_port()
    owner = f"""
import asyncio, os, signal, sys
from pathlib import Path
from tests.cluster.test_real_servers import FLAGS, process_of, run_while_up
from tests.virtual import settings_of
async def die(url):
    os.kill(os.getpid(), signal.SIGKILL)
run_while_up(process_of(settings_of(FLAGS.format("sglang", {str(python)!r})), {port}, Path({str(tmp_path)!r})), die)
"""

    killed = subprocess.run([sys.executable, "-c", owner])
    assert killed.returncode == -signal.SIGKILL
    assert ends(started(python)["pid"], within_s=30)
