"""Requests on stdin, verdicts on stdout, one JSON object a line: the process that checks answers for a `ProcessScorer`.

    {"load": "math"}  ->  {"loaded": "math"}  or  {"error": "..."}
    {"rm_type": "math", "response": "...", "label": "...", "metadata": {}}  ->  {"reward": 1.0}  or  {"error": "..."}

It says ``{"ready": true}`` at its start, and ends with its stdin. A type that is loaded before its first answer takes no
time for imports out of that answer's limit. Its parent kills the process at the limit; should the parent be gone or
stopped, the kernel's alarm does, whatever the answer keeps it busy with.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from miles.errors import RewardFailed
from miles.rollout.rm_hub.rm_types import score_function, score_in_place

MEMORY_LIMIT_BYTES = 4 << 30


def main(timeout_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    serve(sys.stdin.buffer, _claim_stdout(), backstop_s=2 * timeout_s + 1)


def serve(requests: BinaryIO, replies: BinaryIO, backstop_s: float) -> None:
    """Answers requests until there are no more."""
    _reply(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        if "load" in request:
            _reply(replies, load(request["load"]))
            continue
        signal.setitimer(signal.ITIMER_REAL, backstop_s)
        reply = verdict(**request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def load(rm_type: str) -> dict[str, Any]:
    """Imports what a type needs, and, with an answer that nobody gave, what it imports on its first one."""
    try:
        score_function(rm_type)
    except Exception as error:  # importing is no fault that ends the process either: the parent hears of it
        return {"error": repr(error)}
    with suppress(RewardFailed):
        score_in_place(rm_type, r"</think>\boxed{\sqrt{x}}", r"\sqrt{y}", {})
    return {"loaded": rm_type}


def verdict(rm_type: str, response: str, label: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return {"reward": score_in_place(rm_type, response, label, metadata or {})}
    except RewardFailed as error:  # no fault of reward code ends the process: it is one again in the parent
        return {"error": str(error)}


def _claim_stdout() -> BinaryIO:
    """The pipe for replies; whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
