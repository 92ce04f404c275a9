"""The thread around the engine: whoever asks gets an answer, whatever happens to the thread."""

import threading
from concurrent.futures import Future

import pytest

from miles.engine.local.step_thread import StepThread
from miles.errors import EngineUnreachable

WAIT_S = 30


class ScriptedEngine:
    """Steps while told to; a step says that it began, then waits for its end, which may be an error."""

    def __init__(self):
        self.may_step = False
        self.began = threading.Event()
        self.end: Future[None] = Future()
        self.ended: list[str] = []

    def step(self):
        self.began.set()
        self.may_step = False
        self.end.result(WAIT_S)
        self.ended.append("stepped")

    def abort(self, wanted, message):
        self.ended.append(message)

    def take_ended(self):
        ended, self.ended = self.ended, []
        return ended


class Run:
    def __init__(self):
        self.engine = ScriptedEngine()
        self.handed: list[list[str]] = []
        self.thread = StepThread(self.engine, self.handed.append)

    def begin_step(self):
        def may_step():
            self.engine.may_step = True

        self.thread.post(may_step)
        assert self.engine.began.wait(WAIT_S)


@pytest.fixture
def run():
    run = Run()
    yield run
    if not run.engine.end.done():
        run.engine.end.set_result(None)
    run.thread.stop()
    assert run.thread.wait_stopped(WAIT_S)


def test_commands_run_after_the_step_that_is_under_way_and_in_order(run):
    run.begin_step()
    first, second = run.thread.call(lambda: len(run.handed)), run.thread.call(lambda: 1 / 0)
    assert not first.done()
    run.engine.end.set_result(None)
    assert first.result(WAIT_S) == 1, "what ended is handed over before the next commands"
    with pytest.raises(ZeroDivisionError):
        second.result(WAIT_S)
    assert run.thread.call(lambda: "alive").result(WAIT_S) == "alive"


def test_a_command_that_comes_with_the_end_is_still_answered(run):
    run.begin_step()
    run.thread.stop()
    late = run.thread.call(lambda: "answered")
    run.engine.end.set_result(None)
    assert late.result(WAIT_S) == "answered"
    assert run.thread.wait_stopped(WAIT_S)
    assert run.handed == [["stepped"], ["the engine is shutting down"]]
    with pytest.raises(EngineUnreachable, match="shutting down"):
        run.thread.call(lambda: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_ends_the_thread_and_everything_open_with_it(run):
    run.begin_step()
    late = run.thread.call(lambda: "answered")
    run.engine.end.set_exception(RuntimeError("defect"))
    assert run.thread.wait_stopped(WAIT_S)
    assert late.result(WAIT_S) == "answered"
    assert run.handed == [["the engine is shutting down"]]
    assert not run.thread.alive
    with pytest.raises(EngineUnreachable):
        run.thread.post(lambda: None)


def test_a_command_that_nobody_waits_for_any_more_does_not_run_and_ends_nothing(run):
    run.begin_step()
    ran = []
    assert run.thread.call(lambda: ran.append(1)).cancel()
    run.engine.end.set_result(None)
    assert run.thread.call(lambda: "alive").result(WAIT_S) == "alive"
    assert ran == []
