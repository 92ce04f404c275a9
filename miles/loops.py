"""The one event loop of a process: async code of hooks and first-era calls runs on it, whichever thread asks.

A process that already runs a loop (a Ray actor) adopts it; any other gets one thread with its own loop on first use.
Everything bound to a loop (locks, HTTP sessions) is made and closed here, so nothing is ever bound to two.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def adopt(loop: asyncio.AbstractEventLoop) -> None:
    """Makes a running loop the one of this process; called by its owner before anything else needs one."""
    global _loop, _thread
    with _lock:
        _loop, _thread = loop, None


def loop() -> asyncio.AbstractEventLoop:
    """The process's loop, started on a daemon thread if there is none."""
    global _loop, _thread
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="miles-loop", daemon=True)
            _thread.start()
        return _loop


def thread() -> threading.Thread | None:
    """The thread that this module started for the loop, if it did."""
    return _thread


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Runs a coroutine on the process's loop and waits for it from another thread.

    Raises RuntimeError when called on that loop itself: waiting there would never end.
    """
    target = loop()
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is target:
        coroutine.close()
        raise RuntimeError("run() was called on the event loop it would wait for; await the coroutine instead")
    return asyncio.run_coroutine_threadsafe(coroutine, target).result(timeout_s)


async def await_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine that runs on the process's loop, from whichever loop the caller is on."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop()))


def stop() -> None:
    """Ends the loop thread that this module started, if any. Twice is fine."""
    global _loop, _thread
    with _lock:
        target, thread = _loop, _thread
        _loop, _thread = None, None
    if thread is None or target is None:
        return
    target.call_soon_threadsafe(target.stop)
    thread.join(timeout=5)
    target.close()


class Changes:
    """Wakes everybody who waits whenever something changed; each waiter then looks at its own condition again."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order: a run must not depend on hashes

    def notify(self) -> None:
        """Something changed. Called on the loop by whoever changed it, after the change."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once ``condition()`` holds; what it raises goes to the waiter."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
