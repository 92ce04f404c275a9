"""Door: runs a coroutine on the process's event loop and waits for it."""

from miles.loops import run

__all__ = ["run"]
