"""A run folder goes in, `report.html` comes out: one page that needs nothing else, neither network nor neighbours."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from miles.observe.history import History
from miles.observe.lines import best_line, event_line
from miles.observe.plots import FIGURES
from miles.observe.run_folder import EVAL_STEP
from miles.observe.units import duration, number

EVENTS_SHOWN = 40

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --ink: #1d2129; --soft: #667080; --line: #e3e6eb; --bad: #b3372f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --card: #1d2026; --ink: #e6e8ec; --soft: #949cab; --line: #2d323b; --bad: #f08c82; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; } h2 { margin: 2.5rem 0 .8rem; font-size: 1.1rem; }
.soft { color: var(--soft); } .bad { color: var(--bad); white-space: pre-wrap; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.4rem; }
.tiles div, table, img, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles div { flex: 1 1 10rem; padding: .7rem 1rem; } .tiles b { display: block; font-size: 1.5rem; line-height: 1.3; }
.plots { columns: 2 30rem; column-gap: .8rem; }
img { width: 100%; margin-bottom: .8rem; padding: .6rem; background: #fff; break-inside: avoid; }
.tables { columns: 2 30rem; column-gap: .8rem; }
table { width: 100%; border-spacing: 0; margin-bottom: .8rem; break-inside: avoid; font-size: .87rem; }
td, th { padding: .22rem .9rem; text-align: left; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
""".strip()


def write_report(folder: Path) -> Path:
    """Writes the page from what the run folder holds, plots as drawn before. Raises DataError, OSError."""
    history = History.read(folder)
    path = folder / "report.html"
    plots = [plot for name in FIGURES if (plot := folder / "plots" / f"{name}.png").exists()]
    path.write_text(render(history, plots), encoding="utf-8")
    return path


def render(history: History, plots: Sequence[Path]) -> str:
    """The page as text."""
    name = escape(history.name)
    sections = [
        f"<header><h1>{name}</h1><div>{_status(history)}</div></header>",
        _tiles(history),
        _plots(plots),
        _last_metrics(history),
        _settings(history.settings),
        _events(history.events),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} – miles</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _status(history: History) -> str:
    end = history.end
    if end is None:
        return '<span class="soft">still running, or killed</span>'
    when = datetime.fromtimestamp(end["time"]).strftime("%Y-%m-%d %H:%M")
    if end.get("cause") is None:
        return f'<span class="soft">finished {when}</span>'
    return f'<span class="bad">stopped {when}: {escape(str(end["cause"]))}</span>'


def _tiles(history: History) -> str:
    evals = [(name, scores) for name in history.eval_sets if (scores := history.eval_series(f"eval/{name}"))]
    tiles = [(f"{name}, step {s.steps[-1]}", number(s.values[-1]), best_line(s.by_step)) for name, s in evals]
    if rewards := history.series("rollout/raw_reward").values:
        tiles.append(("reward, last step", number(rewards[-1]), f"first {number(rewards[0])}"))
    tiles.append(("training steps", str(history.steps), ""))
    tiles.append(("wall time", duration(history.wall_time_s), ""))
    if history.trained_tokens:
        tiles.append(("trained tokens", number(history.trained_tokens), ""))
    cells = (
        f'<div><span class="soft">{escape(label)}</span><b>{value}</b><span class="soft">{note}</span></div>'
        for label, value, note in tiles
    )
    return f'<section class="tiles">{"".join(cells)}</section>'


def _plots(plots: Sequence[Path]) -> str:
    images = (
        f'<img alt="{escape(plot.stem)}" src="data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}">'
        for plot in plots
    )
    return _section("Course of the run", f'<div class="plots">{"".join(images)}</div>') if plots else ""


def _last_metrics(history: History) -> str:
    """The newest row of each axis, a table for each family of names."""
    families: dict[str, list[tuple[str, str]]] = {}
    for row in (*history.evals[-1:], *history.train[-1:]):
        for name, value in sorted(row.items()):
            if "/" in name and name != EVAL_STEP:
                families.setdefault(name.split("/")[0], []).append((name, number(value)))
    tables = "".join(_table(rows, numeric=True) for rows in families.values())
    return _section(f"Metrics of step {history.steps}", f'<div class="tables">{tables}</div>') if families else ""


def _settings(settings: dict[str, Any]) -> str:
    """What the user set, from `settings.json`: a section for each owner, and the names that were given."""
    flat = {name: value for owner in settings.values() if isinstance(owner, dict) for name, value in owner.items()}
    rows = [(name, _setting(flat[name])) for name in settings.get("given", []) if name in flat]
    return _section("Settings that were given", _table(rows)) if rows else ""


def _setting(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _events(events: Sequence[dict[str, Any]]) -> str:
    if not events:
        return ""
    kinds = Counter(event["kind"].replace("_", " ") for event in events)
    counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    rows = [(_clock(event["time"]), _event_text(event)) for event in events[-EVENTS_SHOWN:]]
    return _section("Events", f'<p class="soft">{escape(counts)}</p>{_table(rows)}')


def _event_text(event: dict[str, Any]) -> str:
    return event_line(event["kind"], {name: value for name, value in event.items() if name not in ("time", "kind")})


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(rows: Iterable[tuple[str, str]], numeric: bool = False) -> str:
    cell = '<td class="n">' if numeric else "<td>"
    return "<table>" + "".join(f"<tr><td>{escape(a)}</td>{cell}{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%m-%d %H:%M:%S")
