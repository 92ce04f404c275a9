"""A parent's pid and a command in; that command, in this very process, ended by the kernel when the parent dies.

Run as a script, by its path: it imports nothing of miles. The wish to be signalled lives on through ``exec`` (prctl(2)), so
the server needs to know nothing of it, and no process stands between.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit("the process that started this engine is gone")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
