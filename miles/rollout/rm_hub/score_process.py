"""Requests on stdin, verdicts on stdout, one JSON object a line: the process that checks answers for a `ProcessScorer`.

    {"rm_type": "math", "response": "...", "label": "..."}  ->  {"reward": 1.0}  or  {"error": "..."}

It says ``{"ready": true}`` once everything is imported, and ends with its stdin. Its parent kills it at the limit; should
the parent be gone or stopped, the kernel's alarm does, whatever the answer keeps it busy with.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from miles.rollout.rm_hub.rm_types import RM_TYPES, score_function

MEMORY_LIMIT_BYTES = 4 << 30


def main(timeout_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    serve(sys.stdin.buffer, _claim_stdout(), backstop_s=2 * timeout_s + 1)


def serve(requests: BinaryIO, replies: BinaryIO, backstop_s: float) -> None:
    """Answers requests until there are no more."""
    for rm_type in RM_TYPES:
        score_function(rm_type)(r"\boxed{\sqrt{x}}", r"\sqrt{y}")
    _reply(replies, {"ready": True})
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, backstop_s)
        reply = verdict(**json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def verdict(rm_type: str, response: str, label: str) -> dict[str, Any]:
    try:
        return {"reward": score_function(rm_type)(response, label)}
    except Exception as error:  # no fault of reward code ends the process: the parent turns it into RewardFailed
        return {"error": repr(error)}


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
