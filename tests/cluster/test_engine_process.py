"""One engine process: started, watched, started again; the stand-in engines are one-line programs."""

import asyncio
import os
import signal
import sys

import pytest

from miles.cluster.actors import free_port, given_up_metric
from miles.cluster.engine_process import EngineProcess, EngineStartFailed
from miles.engine.launch import Launch

LEASH = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
"""Killed by the kernel when the tests end, however they end: one that is stopped would not take the engine's own hint."""
READY = "print('miles-engine ready http://x', flush=True)"
SERVES = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *given): pass
server = http.server.HTTPServer(('127.0.0.1', PORT), Handler)
{READY}
server.serve_forever()
"""


def process_of(tmp_path, program, port=1, ready_line="miles-engine ready", **limits):
    values = dict(start_timeout_s=60.0, health_interval_s=60.0, health_timeout_s=60.0)
    launch = Launch((sys.executable, "-c", LEASH + program.replace("PORT", str(port))), ready_line=ready_line)
    return EngineProcess(launch, f"http://127.0.0.1:{port}", tmp_path / "logs" / "engine.log", **(values | limits))


def run_until_downs(engine, count, when_up=None):
    """Runs the engine until it went down ``count`` times; what happened, in order."""
    log = []

    async def main():
        done = asyncio.Event()

        async def up(url):
            log.append("up")
            if when_up:
                when_up(engine)

        async def down(url, why):
            log.append(why)
            if sum(entry != "up" for entry in log) == count:
                done.set()

        task = asyncio.create_task(engine.run(up, down))
        waiter = asyncio.create_task(done.wait())
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task

    asyncio.run(main())
    return log


def test_a_killed_engine_is_told_down_before_it_comes_up_again(tmp_path):
    engine = process_of(tmp_path, f"{READY}; import signal; signal.pause()")
    kill = lambda e: os.kill(e.pid, signal.SIGKILL)  # noqa: E731
    assert run_until_downs(engine, 2, when_up=kill) == ["up", "engine process ended with exit code -9"] * 2
    assert engine.pid is None


def test_an_engine_that_hangs_is_replaced(tmp_path):
    port = free_port()
    engine = process_of(tmp_path, SERVES, port, health_interval_s=0.05, health_timeout_s=0.2)
    stop = lambda e: os.kill(e.pid, signal.SIGSTOP)  # noqa: E731
    pids = []
    log = run_until_downs(engine, 1, when_up=lambda e: (pids.append(e.pid), stop(e)))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert log[0] == "up"
    assert "no answer to a health check in 0.2 s" in log[1]


def test_an_engine_that_says_it_is_ill_is_replaced(tmp_path):
    port = free_port()
    ill = SERVES.replace("send_response(200)", "send_response(503)")
    engine = process_of(tmp_path, ill, port, health_interval_s=0.05)
    assert run_until_downs(engine, 1) == ["up", "a health check was answered 503"]


def test_an_engine_that_never_gets_ready_ends_the_run_with_its_own_words(tmp_path):
    engine = process_of(tmp_path, "import sys; sys.exit('no such tensor')")

    async def never(*given):
        raise AssertionError("it was never up")

    with pytest.raises(EngineStartFailed, match="no such tensor"):
        asyncio.run(engine.run(never, never))


def test_a_server_that_says_nothing_is_up_once_its_health_answers_200(tmp_path):
    port = free_port()
    engine = process_of(tmp_path, SERVES, port, ready_line=None)
    kill = lambda e: os.kill(e.pid, signal.SIGKILL)  # noqa: E731
    assert run_until_downs(engine, 1, when_up=kill) == ["up", "engine process ended with exit code -9"]


@pytest.mark.parametrize("program", ["import sys; sys.exit('no GPU')", SERVES.replace("200", "503")])
def test_a_server_that_ends_or_stays_unhealthy_has_failed_to_start(tmp_path, program):
    limit_s = 60.0 if "no GPU" in program else 1.0
    engine = process_of(tmp_path, program, free_port(), ready_line=None, start_timeout_s=limit_s)
    with pytest.raises(EngineStartFailed, match="no GPU" if "no GPU" in program else r"not ready within 1 s"):
        asyncio.run(engine.run(None, None))


def test_an_engine_that_is_too_slow_to_start_is_ended(tmp_path):
    engine = process_of(tmp_path, "import signal; signal.pause()", start_timeout_s=0.05)
    with pytest.raises(EngineStartFailed, match=r"not ready within 0\.05 s"):
        asyncio.run(engine.run(None, None))


@pytest.mark.parametrize(
    ("reason", "metric"),
    [
        ("filtered_zero_std", "rollout/dynamic_filter/drop_zero_std"),
        ("filtered", "rollout/dynamic_filter/drop"),
        ("stale", "rollout/fully_async/stale_groups_filtered"),
        ("timeout", "rollout/given_up/timeout"),
    ],
)
def test_lost_groups_are_counted_under_the_contracts_names(reason, metric):
    assert given_up_metric(reason) == metric
