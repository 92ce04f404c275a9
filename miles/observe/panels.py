"""A run's history and a pair of axes go in, one drawn panel comes out: lines, bands and stacked bars over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from miles.observe.history import History, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#2f6fde", "#e0812f", "#2a9d6f", "#8a5cd1", "#cc4b4b", "#c3c8d1"
LINES = (BLUE, ORANGE, GREEN, PURPLE, RED)
AGES = ("#cfe0fb", "#94b8f3", "#5a8fe8", "#2f6fde", "#1d4da8", "#e0812f", "#b3541a")
"""From fresh to old; the last one is for everything that is older."""
MOST_BARS, MARKED_POINTS = 60, 30

PHASES = {
    "perf/train_wait_time": ("waiting for rollouts", ORANGE),
    "perf/actor_train_time": ("training", BLUE),
    "perf/update_weights_time": ("publishing weights", GREEN),
    "perf/save_model_time": ("saving", RED),
}

Draw = Callable[["Axes", History], None]


class Panel(NamedTuple):
    """One pair of axes: ``draw`` is called where ``has`` finds something in the history."""

    title: str
    unit: str
    has: Callable[[History], bool]
    draw: Draw


class Layer(NamedTuple):
    """One colour of a stack: its value at each step."""

    label: str
    color: str
    values: Sequence[float]


def any_of(*metrics: str) -> Callable[[History], bool]:
    return lambda history: any(history.series(metric) for metric in metrics)


def lines(labels: Mapping[str, str], from_zero: bool = True) -> Draw:
    """A line for each metric, named by its label."""

    def draw(axes: Axes, history: History) -> None:
        for (metric, label), color in zip(labels.items(), LINES, strict=False):
            line(axes, history.series(metric), label, color)
        if from_zero:
            axes.set_ylim(bottom=0)

    return draw


def bars(metric: str, color: str) -> Draw:
    """A bar for each step."""

    def draw(axes: Axes, history: History) -> None:
        steps, values = history.series(metric)
        stack(axes, steps, [Layer(metric, color, values)])

    return draw


def line(axes: Axes, series: Series, label: str, color: str) -> None:
    if series:
        few = len(series.steps) <= MARKED_POINTS
        axes.plot(*series, color=color, label=label, marker="o" if few else "", markersize=3.5)


def stack(axes: Axes, steps: Sequence[int], layers: Sequence[Layer]) -> None:
    """Bars of stacked layers; where steps are more than ``MOST_BARS``, a bar is the mean of several."""
    size = math.ceil(len(steps) / MOST_BARS)
    middles = [_mean(chunk) for chunk in _chunks(steps, size)]
    floor = [0.0] * len(middles)
    for layer in layers:
        heights = [_mean(chunk) for chunk in _chunks(layer.values, size)]
        axes.bar(middles, heights, width=0.9 * size, bottom=floor, color=layer.color, label=layer.label)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.grid(axis="x", visible=False)


def reward(axes: Axes, history: History) -> None:
    """Each step and, in a run of some length, the running mean."""
    steps, values = history.series("rollout/raw_reward")
    window = max(5, len(steps) // 20)
    if len(steps) < 2 * window:
        line(axes, Series(steps, values), "each step", BLUE)
        return
    means = [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, means, color=BLUE, label=f"mean of {window} steps")


def accuracy(axes: Axes, history: History) -> None:
    """Every evaluation set, over the steps that were evaluated."""
    for name, color in zip(history.eval_sets, LINES, strict=False):
        line(axes, history.eval_series(f"eval/{name}"), name, color)
    axes.margins(y=0.15)


def length(axes: Axes, history: History) -> None:
    """Mean in the band from the shortest response to the longest."""
    steps, longest = history.series("rollout/response_len/max")
    shortest = history.series("rollout/response_len/min").values
    if len(longest) == len(shortest):
        axes.fill_between(steps, shortest, longest, color=BLUE, alpha=0.12, linewidth=0, label="shortest to longest")
    line(axes, history.series("rollout/response_len/mean"), "mean", BLUE)
    axes.set_ylim(bottom=0)


def age(axes: Axes, history: History) -> None:
    """Mean and oldest of the groups of each batch."""
    metrics = {"avg_staleness": "mean of groups", "max_staleness": "oldest group"}
    lines({f"rollout/fully_async/{metric}": label for metric, label in metrics.items()})(axes, history)


def ages(axes: Axes, history: History) -> None:
    """What share of the trained tokens was how old."""
    head = "rollout/fully_async/age/"
    rows = [
        {key.removeprefix(head): share for key, share in row.items() if key.startswith(head)} for row in history.train
    ]
    steps = [int(row["step"]) for row, shares in zip(history.train, rows, strict=True) if shares]
    rows = [shares for shares in rows if shares]
    known = sorted({int(key) for shares in rows for key in shares if key != "unknown"})
    old = len(AGES) - 1
    layers = [Layer(f"age {k}", AGES[max(0, k)], [s.get(str(k), 0.0) for s in rows]) for k in known if k < old]
    older = [k for k in known if k >= old]
    if older:
        layers.append(Layer(f"{old} or more", AGES[-1], [sum(s.get(str(k), 0.0) for k in older) for s in rows]))
    if any("unknown" in shares for shares in rows):
        layers.append(Layer("unknown", GREY, [shares.get("unknown", 0.0) for shares in rows]))
    stack(axes, steps, layers)
    axes.set_ylim(0, 1)


def has_ages(history: History) -> bool:
    return any(key.startswith("rollout/fully_async/age/") for row in history.train for key in row)


def phases(axes: Axes, history: History) -> None:
    """Seconds of a step by what the trainer did; what no phase accounts for is "other"."""
    rows = [row for row in history.train if "perf/step_time" in row]
    found = {metric: look for metric, look in PHASES.items() if any(metric in row for row in rows)}
    layers = [Layer(label, color, [row.get(m, 0.0) for row in rows]) for m, (label, color) in found.items()]
    rest = [max(0.0, row["perf/step_time"] - sum(row.get(m, 0.0) for m in found)) for row in rows]
    stack(axes, [int(row["step"]) for row in rows], [*layers, Layer("other", GREY, rest)])


def _chunks(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
