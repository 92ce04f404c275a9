"""The engine as users start it: a process of its own, told apart by one line on stdout."""

import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "miles.engine.local", "--dtype", "float32", "--model-path"]


@pytest.fixture
def start():
    """Starts a process and kills it at the end of the test, should it still run."""
    started = []

    def run(command):
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ready_url(process):
    line = process.stdout.readline()
    assert line.startswith("miles-engine ready http://127.0.0.1:"), line + process.stderr.read()
    return line.split()[-1]


def test_ready_line_then_http_then_sigterm_ends_it_with_exit_code_0(start, folder):
    process = start([*COMMAND, str(folder), "--weight-version", "7"])
    url = ready_url(process)
    body = {
        "input_ids": [5, 9, 2],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    with httpx.Client(base_url=url) as client:
        meta = client.post("/generate", json=body).json()["meta_info"]
        assert meta["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]
        assert client.post("/generate", content=b"{").status_code == 400
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stdout.read() == "", "the ready line is the only one on stdout"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_requests_in_it_and_they_get_their_reply(start, folder, signal_number):
    process = start([*COMMAND, str(folder)])
    url = ready_url(process)
    with ThreadPoolExecutor() as pool:
        httpx.post(f"{url}/pause_generation", json={"mode": "in_place"})
        reply = pool.submit(httpx.post, f"{url}/generate", json={"input_ids": [1]}, timeout=60)
        while httpx.get(f"{url}/server_info").json()["num_queue_reqs"] == 0:
            pass
        process.send_signal(signal_number)
        assert reply.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert process.wait(30) == 0


def test_a_connection_that_closes_frees_its_request(start, folder):
    url = ready_url(start([*COMMAND, str(folder)]))
    httpx.post(f"{url}/pause_generation", json={"mode": "in_place"})
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as connection:
        body = b'{"input_ids": [1]}'
        head = f"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while httpx.get(f"{url}/server_info").json()["num_queue_reqs"] == 0:
            pass
    while httpx.get(f"{url}/server_info").json()["num_queue_reqs"] == 1:
        pass


def test_it_ends_when_the_process_that_started_it_dies(start, folder):
    parent = start(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True);"
            "print(p.pid, p.stdout.readline(), flush=True); p.wait()",
            *COMMAND,
            str(folder),
        ]
    )
    engine = int(parent.stdout.readline().split()[0])
    ended = os.pidfd_open(engine)
    parent.kill()
    assert select.select([ended], [], [], 30)[0], "the engine outlived its parent"
    os.close(ended)


def test_help_comes_without_importing_torch():
    code = "import sys, miles.engine.local.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_that_cannot_run_ends_it_with_the_reason(start, tmp_path):
    process = start([*COMMAND, str(tmp_path)])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == "" and "config.json does not exist" in err and "Traceback" not in err


def test_a_port_that_is_taken_ends_it_with_the_reason(start, folder):
    port = ready_url(start([*COMMAND, str(folder)])).rsplit(":", 1)[1]
    process = start([*COMMAND, str(folder), "--port", port])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"--port {port} can't be bound" in err and "Traceback" not in err
