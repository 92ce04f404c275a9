"""Commands from any thread in, ended sequences out, handed over once per step: the thread that drives an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from miles.engine.local.engine import Engine
from miles.engine.local.sequence import Sequence
from miles.errors import EngineUnreachable

T = TypeVar("T")
HandOver = Callable[[list[Sequence]], None]


class StepThread:
    """Steps ``engine`` while something may run, and applies commands between two steps.

    ``hand_over`` gets the ended sequences on this thread; it must not block. Where the thread ends, by `stop` or by a
    defect, whatever is still open is aborted, and later calls raise EngineUnreachable.
    """

    def __init__(self, engine: Engine, hand_over: HandOver) -> None:
        self._engine = engine
        self._hand_over = hand_over
        self._commands: list[Callable[[], None]] = []
        self._stopping = False
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, command: Callable[[], None]) -> None:
        """Has a command run between two steps. It must not raise."""
        with self._wake:
            if self._closed:
                raise EngineUnreachable("the engine is shutting down")
            self._commands.append(command)
            self._wake.notify()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Has a command run between two steps; the future has its result or error. Cancelled before that, it never runs."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except Exception as error:  # invariant: whoever asked gets the error, and the thread lives
                future.set_exception(error)

        self.post(run)
        return future

    def stop(self) -> None:
        """Ends the thread after its current step. Twice is fine."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def wait_stopped(self, timeout_s: float) -> bool:
        """Waits for the end of the thread; whether it came in time."""
        self._thread.join(timeout_s)
        return not self.alive

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._stopping:
                self._apply(self._wait_commands())
                if engine.may_step:
                    engine.step()
                if ended := engine.take_ended():
                    self._hand_over(ended)
        finally:
            with self._wake:
                self._closed = True
            self._apply(self._commands)
            engine.abort(lambda _: True, "the engine is shutting down")
            self._hand_over(engine.take_ended())

    def _wait_commands(self) -> list[Callable[[], None]]:
        """Waits for a command or something to run; returns the commands."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._stopping or self._engine.may_step)
            commands, self._commands = self._commands, []
            return commands

    @staticmethod
    def _apply(commands: list[Callable[[], None]]) -> None:
        for command in commands:
            command()
