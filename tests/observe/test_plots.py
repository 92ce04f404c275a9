"""Figures show what the metrics hold and nothing else; stacked bars add up to what they are parts of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from miles.observe import panels
from miles.observe.history import History
from miles.observe.plots import FIGURES, draw_all
from miles.observe.run_folder import RunFolder


def history(*rows: dict[str, float]) -> History:
    train = [{"step": step, **row} for step, row in enumerate(rows, start=1)]
    return History("run", train, [], [], {})


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


def bars_of(axes: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Label to (middle, bottom, height) of each bar."""
    return {
        str(stack.get_label()): [(bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in stack]
        for stack in axes.containers
    }


def test_every_figure_is_drawn_from_a_full_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [
        "rollout/raw_reward", "rollout/response_len/mean", "rollout/response_len/min", "rollout/response_len/max",
        "rollout/fully_async/avg_staleness", "rollout/fully_async/max_staleness", "rollout/fully_async/age/0",
        "rollout/wasted_tokens", "perf/step_time", "perf/train_wait_time", "train/loss", "train/grad_norm",
    ]  # fmt: skip
    for step in (1, 2, 3):
        folder.append_step(step, {name: 0.5 for name in names})
        folder.append_eval(step, {"eval/aime": 0.5, "eval/aime-truncated_ratio": 0.0})
    drawn = draw_all(tmp_path)
    assert [path.name for path in drawn] == [f"{name}.png" for name in FIGURES]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize("steps", [1, 400])
def test_runs_of_any_length_are_drawn_gaps_included(tmp_path: Path, steps: int) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, steps + 1):
        folder.append_step(step, {"rollout/raw_reward": math.nan if step % 7 == 0 else 0.5})
    assert [path.name for path in draw_all(tmp_path)] == ["reward.png"]


def test_empty_run_draws_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path)
    assert draw_all(tmp_path) == []


def test_phases_and_the_rest_add_up_to_the_step(axes: Axes) -> None:
    rows = [
        {"perf/step_time": 4.0, "perf/train_wait_time": 1.0, "perf/actor_train_time": 2.5},
        {"perf/step_time": 3.0, "perf/train_wait_time": 0.5, "perf/actor_train_time": 2.0, "perf/save_model_time": 0.5},
    ]
    panels.phases(axes, history(*rows))
    bars = bars_of(axes)
    assert list(bars) == ["waiting for rollouts", "training", "saving", "other"]
    assert [bottom + height for _, bottom, height in bars["other"]] == pytest.approx([4.0, 3.0])
    assert [height for *_, height in bars["other"]] == pytest.approx([0.5, 0.0])


def test_ages_stack_from_fresh_to_old_up_to_one(axes: Axes) -> None:
    head = "rollout/fully_async/age/"
    rows = [
        {f"{head}0": 0.5, f"{head}1": 0.5},
        {},
        {f"{head}2": 0.25, f"{head}9": 0.25, f"{head}12": 0.25, f"{head}unknown": 0.25},
    ]
    panels.ages(axes, history(*rows))
    bars = bars_of(axes)
    assert list(bars) == ["age 0", "age 1", "age 2", "6 or more", "unknown"]
    assert [middle for middle, *_ in bars["age 0"]] == [1, 3]
    assert [height for *_, height in bars["6 or more"]] == [0.0, 0.5]
    assert [bottom + height for _, bottom, height in bars["unknown"]] == pytest.approx([1.0, 1.0])


def test_bars_of_a_long_run_are_means_of_their_steps(axes: Axes) -> None:
    values = np.random.default_rng(0).random(150)
    panels.stack(axes, range(1, 151), [panels.Layer("x", "red", values.tolist())])
    bars = bars_of(axes)["x"]
    assert len(bars) == 50
    assert [height for *_, height in bars] == pytest.approx(values.reshape(50, 3).mean(axis=1).tolist())
    assert [middle for middle, *_ in bars] == pytest.approx(np.arange(1, 151).reshape(50, 3).mean(axis=1).tolist())


def test_running_mean_of_the_reward_follows_its_steps(axes: Axes) -> None:
    values = np.random.default_rng(0).random(40)
    panels.reward(axes, history(*({"rollout/raw_reward": float(value)} for value in values)))
    each, mean = axes.get_lines()
    assert list(each.get_ydata()) == values.tolist()
    expected = [values[max(0, end - 5) : end].mean() for end in range(1, 41)]
    assert list(mean.get_ydata()) == pytest.approx(expected)
    assert mean.get_label() == "mean of 5 steps"


def test_short_run_shows_its_steps_alone(axes: Axes) -> None:
    panels.reward(axes, history({"rollout/raw_reward": 0.5}, {"rollout/raw_reward": 0.7}))
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == [0.5, 0.7]


def test_evaluations_are_drawn_over_their_own_steps(axes: Axes) -> None:
    evals: list[dict[str, Any]] = [
        {"eval/step": 0, "eval/a-b": 0.1, "eval/a-b-truncated_ratio": 0.0},
        {"eval/step": 10, "eval/a-b": 0.4, "eval/a-b-truncated_ratio": 0.0},
    ]
    panels.accuracy(axes, History("run", [], evals, [], {}))
    (line,) = axes.get_lines()
    assert (line.get_label(), list(line.get_xdata()), list(line.get_ydata())) == ("a-b", [0, 10], [0.1, 0.4])
