"""Steps, evaluations, events and snapshots go in; a rich panel, plain lines or a closing table comes out, at any moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles.observe.lines import best_line, event_line
from miles.observe.metrics import eval_sets
from miles.observe.pace import Pace
from miles.observe.snapshot import Snapshot, who_waits
from miles.observe.units import duration, number, percent, sparkline

REWARD, LENGTH, AGE = "rollout/raw_reward", "rollout/response_len", "rollout/fully_async"
SPARK_WIDTH, GAUGE_WIDTH, EVENTS_SHOWN = 32, 24, 4


class Board:
    """What a run shows now. ``clock`` gives seconds, on any origin."""

    def __init__(self, title: str, steps_total: int, start_step: int, clock: Callable[[], float]) -> None:
        self.title = title
        self.snapshot: Snapshot | None = None
        self._clock = clock
        self._pace = Pace(start_step, steps_total, clock())
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._evals: dict[int, Mapping[str, float]] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_SHOWN)

    # ---- what comes in

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step ``step`` has ended."""
        self._pace.mark(step, self._clock())
        self._metrics = metrics
        if REWARD in metrics:
            self._rewards.append(metrics[REWARD])

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy after training step ``step`` was evaluated, late ones included."""
        self._evals[step] = metrics

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._events.append((self._pace.elapsed_s(self._clock()), event_line(kind, fields)))

    # ---- plain lines

    def step_line(self) -> str:
        """The step that has just ended, and the ring as it is."""
        waited = self._waited_share()
        parts = [
            self._steps(),
            f"reward {self._shown(REWARD)}",
            f"length {self._shown(f'{LENGTH}/mean')}",
            f"age {self._shown(f'{AGE}/avg_staleness')} (max {self._shown(f'{AGE}/max_staleness')})",
            f"loss {self._shown('train/loss')}",
            *(_ring_words(self.snapshot) if self.snapshot else []),
            *([f"trainer waited {percent(waited)}"] if waited is not None else []),
            f"{duration(self._pace.seconds_per_step)}/step",
            f"eta {duration(self._pace.left_s(self._clock()))}",
        ]
        return "  ".join(parts)

    def waiting_line(self) -> str:
        """What a quiet log says now and then, so that a long step doesn't look like a hang."""
        doing = [who_waits(self.snapshot), *_ring_words(self.snapshot)] if self.snapshot else ["starting"]
        return "  ".join([self._steps(), *doing])

    # ---- the panel

    def panel(self) -> Panel:
        """Everything at a glance, in about 20 lines."""
        figures = _figures()
        self._add_learning(figures)
        rows: list[RenderableType] = [self._progress(), Text(), figures]
        if self.snapshot is not None:
            figures.add_row()
            self._add_ring(figures, self.snapshot)
            idle = self.snapshot.trainer == "waiting" or self.snapshot.held_by == "engines"
            rows += [Text(), Text(who_waits(self.snapshot), style="yellow" if idle else "green")]
        if self._events:
            rows += [Text(), self._latest_events()]
        return Panel(
            Stack(*rows),
            title=Text.assemble(("miles", "bold"), f"  {self.title}"),
            title_align="left",
            subtitle=f"weights v{self.snapshot.version}" if self.snapshot else None,
            subtitle_align="right",
            border_style="bright_black",
            padding=(1, 2),
        )

    def _progress(self) -> Table:
        pace, now = self._pace, self._clock()
        done, left = duration(pace.elapsed_s(now)), duration(pace.left_s(now))
        bar = ProgressBar(max(1, pace.steps_total), pace.step, complete_style="cyan", finished_style="green")
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_row(
            Text(self._steps(), style="bold"),
            bar,
            f"{duration(pace.seconds_per_step)}/step   {done} gone   [bold]eta {left}[/]",
        )
        return line

    def _add_learning(self, grid: Table) -> None:
        grid.add_row("reward", self._shown(REWARD), Text(sparkline(self._rewards, SPARK_WIDTH), style="green"))
        for name, scores in self._scores().items():
            curve = Text(sparkline(list(scores.values()), SPARK_WIDTH), style="magenta")
            curve.append(f"   {best_line(scores)}", style="dim")
            grid.add_row(Text(f"eval {name}"), number(scores[max(scores)]), curve)
        longest, truncated = self._shown(f"{LENGTH}/max"), percent(self._metrics.get("rollout/truncated_ratio"))
        grid.add_row("length", self._shown(f"{LENGTH}/mean"), _note(f"max {longest}   truncated {truncated}"))
        oldest = self._shown(f"{AGE}/max_staleness")
        grid.add_row("age", self._shown(f"{AGE}/avg_staleness"), _note(f"max {oldest}"))
        gap, norm = self._shown("train/train_rollout_logprob_abs_diff"), self._shown("train/grad_norm")
        grid.add_row("loss", self._shown("train/loss"), _note(f"gradient norm {norm}   log-prob gap {gap}"))

    def _add_ring(self, grid: Table, now: Snapshot) -> None:
        grid.add_row("buffer", f"{now.buffered_groups}", _gauge(now.buffered_groups, now.buffer_capacity, "groups"))
        grid.add_row("running", f"{now.running_samples}", _gauge(now.running_samples, now.slots, "slots"))
        style = "dim" if now.engines_serving == now.engines else "bold red"
        serving = Text(f"tokens/s   {now.engines_serving} of {now.engines} serve", style)
        grid.add_row("engines", number(now.engine_tokens_per_s), serving)
        waited = self._waited_share()
        share = "" if waited is None else f"   waited {percent(waited)} of the last step"
        grid.add_row("trainer", number(now.trainer_tokens_per_s), _note(f"tokens/s{share}"))

    def _latest_events(self) -> Table:
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="dim", justify="right", no_wrap=True)
        lines.add_column(no_wrap=True, overflow="ellipsis")
        for at, line in self._events:
            lines.add_row(duration(at), Text(line))
        return lines

    # ---- the end

    def summary(self, cause: str | None, left: Mapping[str, Path]) -> Table:
        """How the run ended (``cause`` None: as it should) and what it left: paths by name."""
        pace = self._pace
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("end", Text("finished", style="green") if cause is None else Text(cause, style="bold red"))
        table.add_row("steps", f"{pace.step} of {pace.steps_total}, {duration(pace.elapsed_s(self._clock()))}")
        if self._rewards:
            table.add_row("reward", f"{number(self._rewards[0])} to {number(self._rewards[-1])}")
        for name, scores in self._scores().items():
            course = f"{number(scores[min(scores)])} to {number(scores[max(scores)])}, {best_line(scores)}"
            table.add_row(Text(f"eval {name}"), course)
        for name, path in left.items():
            table.add_row(name, Text(str(path)))
        return table

    # ---- readings

    def _shown(self, metric: str) -> str:
        return number(self._metrics.get(metric))

    def _steps(self) -> str:
        return f"step {self._pace.step}/{self._pace.steps_total}"

    def _scores(self) -> dict[str, dict[int, float]]:
        """Accuracy by step, in the order of the steps, for each evaluation set that has one."""
        names = eval_sets({key for metrics in self._evals.values() for key in metrics})
        rows = sorted(self._evals.items())
        scores = {name: {step: m[f"eval/{name}"] for step, m in rows if f"eval/{name}" in m} for name in names}
        return {name: found for name, found in scores.items() if found}

    def _waited_share(self) -> float | None:
        waited, whole = self._metrics.get("perf/train_wait_time"), self._metrics.get("perf/step_time")
        return waited / whole if waited is not None and whole else None


def _ring_words(now: Snapshot) -> list[str]:
    return [
        f"buffer {now.buffered_groups}/{now.buffer_capacity}",
        f"running {now.running_samples}/{now.slots}",
        f"engines {number(now.engine_tokens_per_s)} tok/s",
        f"trainer {number(now.trainer_tokens_per_s)} tok/s",
    ]


def _figures() -> Table:
    """Label, value, and what stands beside it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=8, no_wrap=True)
    grid.add_column(style="bold", justify="right", min_width=6, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _note(text: str) -> Text:
    return Text(text, style="dim")


def _gauge(value: int, full: int, unit: str) -> Table:
    style = "yellow" if value >= full else "cyan"
    line = Table.grid(padding=(0, 2))
    line.add_row(
        ProgressBar(max(1, full), min(value, full), width=GAUGE_WIDTH, complete_style=style, finished_style=style),
        _note(f"of {full} {unit}"),
    )
    return line
