"""Stands in for the Python of an environment with sglang or vllm: notes how it was started, then serves as much as we ask.

`make_interpreter` writes it as an executable. It takes what an interpreter takes: ``-c`` code that looks for a module, or
``-m`` and the server's module. The server answers ``/health`` with 503 twice, then with 200, and notes every request.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

SERVERS = {"sglang.launch_server": "sglang", "vllm.entrypoints.cli.main": "vllm"}


def make_interpreter(folder, *modules):
    """An executable in ``folder`` that has ``modules``; it writes `started.json` and `requests.jsonl` beside itself."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\nMODULES = {modules!r}\n{Path(__file__).read_text()}")
    path.chmod(0o755)
    return path


def started(interpreter):
    return json.loads((interpreter.parent / "started.json").read_text())


def requests_of(interpreter):
    """(method, path with query, body) of every request but health checks, in order."""
    lines = (interpreter.parent / "requests.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


class Server(BaseHTTPRequestHandler):
    unhealthy = 2
    label = "default"
    kind = ""

    def do_GET(self):
        if self.path == "/health":
            Server.unhealthy -= 1
            self.reply(503 if Server.unhealthy >= 0 else 200, {})
        elif self.path in ("/model_info", "/weight_info"):
            self.note(None)
            known = self.path == ("/model_info" if Server.kind == "sglang" else "/weight_info")
            self.reply(200 if known else 404, {"weight_version": Server.label})
        else:
            self.reply(404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        self.note(body)
        path = urlsplit(self.path).path
        if Server.kind == "sglang":
            self.sglang(path, body)
        else:
            self.vllm(path, body)

    def sglang(self, path, body):
        if path == "/generate":
            meta = {
                "id": body["rid"],
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
                "weight_version": Server.label,
                "completion_tokens": 2,
            }
            self.reply(200, {"text": "ab", "output_ids": [7, 8], "meta_info": meta})
        elif path in ("/pause_generation", "/continue_generation"):
            self.reply(200, {})
        elif path == "/update_weights_from_disk":
            Server.label = body["weight_version"]
            self.reply(200, {"success": True, "message": "", "num_paused_requests": 0})
        else:
            self.reply(404, {})

    def vllm(self, path, body):
        if path == "/v1/completions":
            choice = {
                "index": 0,
                "text": "ab",
                "token_ids": [7, 8],
                "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25]},
                "finish_reason": "stop",
                "stop_reason": None,
            }
            usage = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
            self.reply(200, {"id": f"cmpl-{body['request_id']}", "choices": [choice], "usage": usage})
        elif path in ("/pause", "/resume"):
            self.reply(200, {"status": path})
        elif path == "/collective_rpc":
            self.reply(200, {"results": [None]})
        elif path == "/update_weight_version":
            Server.label = body["new_version"]
            self.reply(200, {"success": True})
        else:
            self.reply(404, {})

    def note(self, body):
        with open(Path(__file__).parent / "requests.jsonl", "a") as file:
            file.write(json.dumps([self.command, self.path, body]) + "\n")

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def work(server):
    """A worker process, as real servers have: it takes no hints, and sees only late that its server is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.getppid() == server:
        time.sleep(20.0)
    os._exit(0)


def main(modules):
    if sys.argv[1] == "-c":
        sys.exit(sys.argv[3] not in modules)
    beside = Path(__file__).parent
    worker = os.fork()
    if worker == 0:
        work(os.getppid())
    how = {"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid(), "worker": worker}
    (beside / "started.json").write_text(json.dumps(how))
    Server.kind = SERVERS[sys.argv[2]]
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("x" * 100_000, flush=True)  # more than a pipe holds: nobody may leave it unread
    ThreadingHTTPServer(("127.0.0.1", port), Server).serve_forever()


if __name__ == "__main__":
    main(MODULES)  # noqa: F821
