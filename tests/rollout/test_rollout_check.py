"""Settings under which nothing could start, or no batch ever fill, are told before anything starts."""

import pytest

from miles.config import Problems
from miles.errors import Stalled
from miles.rollout.check import check
from miles.sim import clock
from tests.virtual import settings_of, simulation

BASE = "--rollout-batch-size 3 --n-samples-per-prompt 1 --num-rollout 2 --rollout-max-response-len 8 --fully-async "


def problems_of(flags, program="train_async"):
    problems = Problems()
    check(settings_of(flags, program), problems)
    return problems


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("factor", ["0.34", "0.67", "1"])
def test_a_batch_fills_exactly_where_the_check_says_so(slots, factor):
    flags = BASE + f"--async-max-concurrent-samples {slots} --async-data-buffer-capacity-factor {factor}"
    told = problems_of(flags).lines
    run = simulation(flags.replace("--fully-async ", ""))
    if told:
        with pytest.raises(Stalled):
            clock.run(run.run())
    else:
        clock.run(run.run())
        assert len(run.trainer.batches) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--async-max-concurrent-samples 3 --n-samples-per-prompt 4", "one group needs --n-samples-per-prompt 4 slots"),
        ("--async-data-buffer-capacity-factor 0.1", "rounds down to a buffer of 0"),
        ("--max-weight-staleness -1", "--max-weight-staleness -1: must not be negative"),
        ("--pause-generation-mode abort", "retract or in_place works"),
        ("--rollout-top-p 2", "--rollout-top-p 2.0: is no share of probability"),
        ("--eval-temperature -1", "0 (greedy) or more works"),
        ("--rollout-top-k 0", "keeps no token"),
        ("--rollout-function-path a.b", "leave one of the two out"),
        ("--dynamic-sampling-filter-path nowhere.at_all", "--dynamic-sampling-filter-path nowhere.at_all"),
    ],
)
def test_each_problem_names_its_flag_and_what_works(flags, words):
    assert any(words in line for line in problems_of(BASE + flags).lines), problems_of(BASE + flags).lines


def test_the_synchronous_program_refuses_the_asynchronous_mode():
    assert any("run train_async.py" in line for line in problems_of(BASE, "train").lines)


def test_a_path_that_has_moved_is_told_in_one_line():
    flags = BASE.replace("--fully-async", "--rollout-function-path fully_async_rollout.generate_rollout_fully_async")
    problems = problems_of(flags)
    assert problems.lines == []
    assert len([w for w in problems.warnings if "has moved to miles.rollout.fully_async_rollout" in w]) == 1


def test_hooks_that_fit_no_mode_or_no_form_are_told():
    only_here = "--custom-async-data-buffer-path miles.rollout.fully_async_data_buffer.DefaultDataBuffer"
    assert problems_of(BASE + only_here).lines == []
    [line] = problems_of(BASE.replace("--fully-async", "") + only_here).lines
    assert "this run is one_step_off; with --fully-async it works" in line
    [line] = problems_of(BASE + "--custom-async-data-buffer-path math.sqrt").lines
    assert "has no put and no get and no get_metrics" in line
    [line] = problems_of(BASE + "--rollout-sample-filter-path math.sqr").lines
    assert "did you mean math.sqrt?" in line


def test_group_rewards_and_evaluation_are_refused_together():
    [line] = problems_of(BASE + "--group-rm --eval-interval 2").lines
    assert line.startswith("--group-rm: evaluation samples are scored one by one")
    assert problems_of(BASE + "--group-rm").lines == []
