"""Coroutines in, their results out, in virtual time: an event loop whose clock jumps to the next timer.

Nothing real can happen on it: no sockets, no threads, no subprocesses, no wall-clock. If everybody waits and no timer is
left, nothing could ever change again, so the run ends with `Stalled`, which names who waits.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from miles.errors import Stalled

T = TypeVar("T")


class _JumpingSelector(selectors.BaseSelector):
    """Selects nothing; where a real selector would sleep, it moves the clock forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.before_jump: Callable[[float], object] | None = None
        self._files: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._files[key.fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled(f"everybody waits at {self.now:.3f} s of virtual time and no timer is left")
        if timeout > 0:
            if self.before_jump is not None:
                self.before_jump(self.now)
            self.now += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0 s."""

    def __init__(self, before_jump: Callable[[float], object] | None = None) -> None:
        self._jumping = _JumpingSelector()
        self._jumping.before_jump = before_jump
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{getattr(func, '__name__', func)!r} wants a thread: threads don't run in virtual time")

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a socket was opened: sockets don't run in virtual time")


def run(main: Coroutine[Any, Any, T], before_jump: Callable[[float], object] | None = None) -> T:
    """Runs a coroutine to its end in virtual time. Raises `Stalled` where it could only wait for ever.

    ``before_jump`` is called with the time whenever it is about to move on: everything that could happen has happened.
    """
    with _rare_collections(), asyncio.Runner(loop_factory=lambda: VirtualLoop(before_jump)) as runner:
        try:
            return runner.run(main)
        except Stalled as stalled:
            loop = runner.get_loop()
            waiting = sorted(t.get_name() for t in asyncio.all_tasks(loop))
            raise Stalled(f"{stalled}; waiting: {', '.join(waiting)}") from None


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run makes many objects and few cycles: looking for those every 700 objects takes half of its time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
