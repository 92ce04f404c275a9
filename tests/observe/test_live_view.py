"""A terminal sees a panel, everything else sees plain lines; time comes from the clock that is handed in."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from miles.observe.board import Board
from miles.observe.lines import best_line, event_line
from miles.observe.live import QUIET_S, LiveView
from miles.observe.pace import PACE_STEPS, Pace
from miles.observe.snapshot import HeldBy, Snapshot, TrainerState, who_waits
from miles.observe.units import duration, number, percent, sparkline

STEP = {
    "rollout/raw_reward": 0.412,
    "rollout/response_len/mean": 182.4,
    "rollout/response_len/max": 512.0,
    "rollout/truncated_ratio": 0.03,
    "rollout/fully_async/avg_staleness": 0.61,
    "rollout/fully_async/max_staleness": 2.0,
    "train/loss": -0.0123,
    "train/grad_norm": 0.33,
    "perf/step_time": 4.0,
    "perf/train_wait_time": 1.0,
}
EVAL = {"eval/gsm8k": 0.531, "eval/gsm8k-truncated_ratio": 0.0, "eval/gsm8k-pass@1": 0.53, "eval/gsm8k-pass@8": 0.7}


def snapshot(trainer: TrainerState = "waiting", held_by: HeldBy = "slots", **fields: Any) -> Snapshot:
    ring = {"version": 7, "running_samples": 30, "slots": 32, "buffered_groups": 12, "buffer_capacity": 64}
    engines = {"engines_serving": 1, "engines": 2, "engine_tokens_per_s": 1234.0, "trainer_tokens_per_s": 45_000.0}
    return Snapshot(trainer, held_by, **(ring | engines | fields))


def drawn(board: Board, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(board.panel())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# ---- plain lines


def test_every_step_is_one_plain_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], clock: Any
) -> None:
    with LiveView("run", 10, clock=clock) as view:
        for step in (1, 2, 3):
            clock.advance(5)
            view.status(snapshot())
            view.step(step, STEP)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2] == (
        "step 3/10  reward 0.412  length 182  age 0.61 (max 2)  loss -0.0123  buffer 12/64  running 30/32  "
        "engines 1234 tok/s  trainer 45k tok/s  trainer waited 25 %  5.0 s/step  eta 35.0 s"
    )


def test_plain_lines_say_what_evaluations_and_events_say(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView("run", 10) as view:
        view.evaluation(4, EVAL)
        view.event("engine_restarted", {"engine": 1, "after_s": 2.5, "cause": None})
    assert capsys.readouterr().out.splitlines() == [
        "eval of step 4  gsm8k 0.531  pass@8 0.7",
        "engine restarted  engine=1  after_s=2.5",
    ]


def test_quiet_log_says_now_and_then_who_waits(capsys: pytest.CaptureFixture[str], clock: Any) -> None:
    with LiveView("run", 10, clock=clock) as view:
        for _ in range(3):
            clock.advance(QUIET_S / 2)
            view.status(snapshot(trainer="waiting", held_by="engines"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 0/10  trainer waits for rollouts; rollouts wait for an engine  buffer 12/64")


def test_plain_lines_and_summary_need_no_more_than_ascii(capsys: pytest.CaptureFixture[str], clock: Any) -> None:
    with LiveView("run", 10, clock=clock) as view:
        view.step(1, {"rollout/raw_reward": math.nan})
        view.evaluation(1, EVAL)
        clock.advance(QUIET_S)
        view.status(snapshot(engine_tokens_per_s=None))
        view.step(2, STEP)
        view.finish("the disk is full", {"run folder": Path("runs/a")})
    assert capsys.readouterr().out.isascii()


def test_event_of_many_lines_is_one_line() -> None:
    assert event_line("group_given_up", {"reason": "first\n  second"}) == "group given up  reason=first second"


def test_reader_that_goes_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with LiveView("run", 10) as view:
        view.step(1, STEP)
        view.step(2, STEP)


# ---- the panel


def test_terminal_gets_a_panel_and_gets_its_cursor_back(clock: Any) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, _environ={})
    with LiveView("run", 10, console=terminal, clock=clock) as view:
        view.status(snapshot())
        view.step(1, STEP)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "╭" in shown and "0.412" in shown and "trainer waits for rollouts" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_panel_shows_learning_and_the_ring(clock: Any) -> None:
    board = Board("my-run", 10, 0, clock)
    board.snapshot = snapshot()
    board.evaluation(0, {**EVAL, "eval/gsm8k": 0.2})
    for step in (1, 2, 3):
        clock.advance(60)
        board.step(step, {**STEP, "rollout/raw_reward": step / 10})
    board.evaluation(3, EVAL)
    board.event("engine_restarted", {"engine": 1})
    text = drawn(board)
    for part in (
        "my-run", "step 3/10", "1m 00s/step", "3m 00s gone", "eta 7m 00s", "weights v7",
        "▁▅█", "eval gsm8k", "▁█   best 0.531 at step 3", "max 512   truncated 3 %", "0.61  max 2",
        "of 64 groups", "of 32 slots", "1 of 2 serve", "waited 25 % of the last step",
        "trainer waits for rollouts; rollouts run in every slot", "3m 00s  engine restarted  engine=1",
    ):  # fmt: skip
        assert part in text


def test_panel_before_the_first_step_has_no_figures_to_invent(clock: Any) -> None:
    text = drawn(Board("run", 10, 0, clock))
    assert "step 0/10" in text and "eta -" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_panel_keeps_within_its_width(width: int, clock: Any) -> None:
    board = Board("a-run-with-quite-a-long-name", 10_000, 0, clock)
    board.snapshot = snapshot(held_by="credit")
    board.step(1, STEP)
    board.event("group_given_up", {"reason": "x" * 300})
    assert max(map(len, drawn(board, width).splitlines())) <= width


def test_names_in_brackets_are_names_not_markup(clock: Any) -> None:
    board = Board("[red]run[/nope]", 10, 0, clock)
    board.evaluation(1, {"eval/[/bold]": 0.5, "eval/[/bold]-truncated_ratio": 0.0})
    board.event("hook_failed", {"error": "[/x] list[int]"})
    text = drawn(board)
    assert "[red]run[/nope]" in text and "eval [/bold]" in text and "error=[/x] list[int]" in text
    console = Console(file=io.StringIO(), width=100)
    console.print(board.summary("[/why]", {"report": Path("runs/[/a]")}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/why]" in text and "runs/[/a]" in text


def test_late_evaluation_does_not_become_the_newest(clock: Any) -> None:
    board = Board("run", 10, 0, clock)
    board.evaluation(6, {**EVAL, "eval/gsm8k": 0.9})
    board.evaluation(4, {**EVAL, "eval/gsm8k": 0.1})
    assert "0.9  ▁█   best 0.9 at step 6" in drawn(board)


def test_every_state_of_the_ring_has_its_words() -> None:
    sentences = {
        who_waits(snapshot(trainer, held_by)) for trainer in get_args(TrainerState) for held_by in get_args(HeldBy)
    }
    assert len(sentences) == len(get_args(TrainerState)) * len(get_args(HeldBy))


def test_summary_says_how_it_ended_and_where_everything_lies(capsys: pytest.CaptureFixture[str], clock: Any) -> None:
    with LiveView("run", 10, clock=clock) as view:
        view.evaluation(0, {**EVAL, "eval/gsm8k": 0.25})
        for step, reward in ((1, 0.1), (2, 0.3)):
            clock.advance(90)
            view.step(step, {"rollout/raw_reward": reward})
        view.evaluation(2, EVAL)
        view.finish(None, {"report": Path("runs/a/report.html")})
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[-5:]]
    assert [[word.strip() for word in line] for line in lines] == [
        ["end", "finished"],
        ["steps", "2 of 10, 3m 00s"],
        ["reward", "0.1 to 0.3"],
        ["eval", "gsm8k  0.25 to 0.531, best 0.531 at step 2"],
        ["report", "runs/a/report.html"],
    ]


# ---- pace


def test_eta_is_the_rest_at_the_recent_pace_less_what_the_running_step_took() -> None:
    pace = Pace(0, 100, now=50.0)
    assert pace.left_s(60.0) is None
    for step in range(1, 11):
        pace.mark(step, 50.0 + 4 * step)
    assert pace.left_s(90.0) == 90 * 4
    assert pace.left_s(93.0) == 90 * 4 - 3
    assert pace.left_s(1e6) == 0.0


def test_pace_forgets_the_slow_first_steps() -> None:
    pace = Pace(0, 100, now=0.0)
    pace.mark(1, 1000.0)
    for step in range(2, PACE_STEPS + 2):
        pace.mark(step, 1000.0 + 2.0 * (step - 1))
    assert pace.seconds_per_step == 2.0


def test_resumed_run_counts_only_its_own_steps() -> None:
    pace = Pace(40, 100, now=0.0)
    pace.mark(41, 3.0)
    assert pace.seconds_per_step == 3.0
    assert pace.left_s(3.0) == 59 * 3


# ---- words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (math.nan, "-"), (math.inf, "-"), (0.0, "0"), (0.41249, "0.412"), (-0.0123, "-0.0123"),
        (1e-6, "1e-06"), (99.96, "100"), (182.4, "182"), (8192, "8192"), (9999.4, "9999"), (9999.6, "10k"),
        (12_345, "12.3k"), (999_499, "999k"), (999_600, "1M"), (7_390_000, "7.39M"), (-2.5e9, "-2.5G"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_seam(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (math.inf, "-"), (0, "0.0 s"), (8.24, "8.2 s"), (59.94, "59.9 s"), (59.96, "1m 00s"),
        (245, "4m 05s"), (3599.6, "1h 00m"), (3720, "1h 02m"), (86_399.9, "1d 00h"), (183_600, "2d 03h"),
    ],
)  # fmt: skip
def test_durations_have_their_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_missing_share_is_a_dash() -> None:
    assert (percent(0.334), percent(None), percent(math.nan)) == ("33 %", "-", "-")


def test_sparkline_spans_its_values_and_leaves_gaps() -> None:
    assert sparkline([0, 0.5, 1, math.nan, 0], 10) == "▁▅█ ▁"
    assert sparkline([9, 9, 0, 1], 2) == "▁█"
    assert sparkline([3, 3], 5) == "▁▁"
    assert sparkline([], 5) == sparkline([math.nan], 5) == ""


def test_best_is_the_first_of_the_greatest_finite() -> None:
    assert best_line({2: 0.5, 4: math.nan, 6: 0.7, 8: 0.7}) == "best 0.7 at step 6"
    assert best_line({2: math.nan}) == ""
