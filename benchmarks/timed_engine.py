"""The embedded engine, and when each of its steps ended: `python -m benchmarks.timed_engine FILE ENGINE-FLAGS...`.

Each step gives every running request one token, so the time between two steps is the time between two tokens. FILE holds
float64 seconds of the machine's monotonic clock; the first number says how many follow.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from miles.engine.local import __main__ as command
from miles.engine.local.engine import Engine

ROOM = 1_000_000


def main() -> None:
    ends = np.memmap(sys.argv.pop(1), dtype=np.float64, mode="w+", shape=(ROOM,))
    step = Engine.step

    def timed(self: Engine) -> None:
        step(self)
        count = int(ends[0]) + 1
        ends[count] = time.monotonic()
        ends[0] = count

    Engine.step = timed  # type: ignore[method-assign]
    command.main()


if __name__ == "__main__":
    main()
