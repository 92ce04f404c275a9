"""A run folder goes in, `plots/*.png` come out: what was learned, how long, how old, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles.observe import panels
from miles.observe.history import History
from miles.observe.panels import RED, Panel, any_of, bars, lines
from miles.observe.units import number

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": "#22262e",
    "axes.labelcolor": "#5b616d",
    "axes.edgecolor": "#c9ced6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": "#eceef2",
    "grid.linewidth": 0.8,
    "xtick.color": "#5b616d",
    "ytick.color": "#5b616d",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": "#5b616d",
    "legend.handlelength": 1.2,
}

FIGURES: dict[str, list[Panel]] = {
    "reward": [
        Panel("Training reward", "mean per rollout", any_of("rollout/raw_reward"), panels.reward),
        Panel("Evaluation", "mean reward", lambda history: bool(history.eval_sets), panels.accuracy),
    ],
    "staleness": [
        Panel("Age of trained groups", "weight versions", any_of("rollout/fully_async/avg_staleness"), panels.age),
        Panel("Trained tokens by age", "share of tokens", panels.has_ages, panels.ages),
        Panel("Wasted", "tokens per step", any_of("rollout/wasted_tokens"), bars("rollout/wasted_tokens", RED)),
    ],
    "time": [
        Panel("Where the time goes", "seconds per step", any_of("perf/step_time"), panels.phases),
        Panel(
            "Throughput",
            "tokens/s per device",
            any_of("perf/tokens_per_gpu_per_sec"),
            lines({"perf/tokens_per_gpu_per_sec": "generated", "perf/actor_train_tok_per_s": "trained"}),
        ),
        Panel(
            "Finished groups waiting",
            "groups",
            any_of("rollout/fully_async/queue_size"),
            lines({"rollout/fully_async/queue_size": "buffer"}),
        ),
    ],
    "length": [
        Panel("Response length", "tokens", any_of("rollout/response_len/mean"), panels.length),
        Panel(
            "Cut off and looping",
            "share of rollouts",
            any_of("rollout/truncated_ratio"),
            lines({"rollout/truncated_ratio": "truncated", "rollout/repetition_frac": "looping"}),
        ),
        Panel(
            "Length bias",
            "trained / finished",
            any_of("rollout/length_bias"),
            lines({"rollout/length_bias": "all tokens", "rollout/masked_length_bias": "unmasked tokens"}, False),
        ),
    ],
    "training": [
        Panel("Loss", "loss", any_of("train/loss"), lines({"train/loss": "loss"}, False)),
        Panel("Gradient norm", "before clipping", any_of("train/grad_norm"), lines({"train/grad_norm": "norm"})),
        Panel(
            "Trainer against engine",
            "mean |Δ log-prob|",
            any_of("train/train_rollout_logprob_abs_diff"),
            lines({"train/train_rollout_logprob_abs_diff": "difference"}),
        ),
    ],
}


def draw_all(folder: Path) -> list[Path]:
    """Draws each figure that the metrics of a run folder can fill, and gives their paths. Raises DataError, OSError."""
    history = History.read(folder)
    (folder / "plots").mkdir(exist_ok=True)
    drawn = []
    for name, figure in FIGURES.items():
        filled = [panel for panel in figure if panel.has(history)]
        if filled:
            path = folder / "plots" / f"{name}.png"
            _draw(history, filled, path)
            drawn.append(path)
    return drawn


def _draw(history: History, filled: Sequence[Panel], path: Path) -> None:
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(8, 0.4 + 2.4 * len(filled)), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
        grid = figure.subplots(len(filled), squeeze=False, sharex=True)
        for axes, panel in zip(grid[:, 0], filled, strict=True):
            panel.draw(axes, history)
            axes.set_title(panel.title, pad=8)
            axes.set_ylabel(panel.unit)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
            if len(axes.get_legend_handles_labels()[1]) > 1:
                axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=8, borderaxespad=0.2, columnspacing=1.2)
        figure.align_ylabels()
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(path, dpi=120)
