"""Numbers go in, short text with a unit comes out: how every surface (live view, plots, report) writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = "-"
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Three significant digits, thousands as k, M, G: 0.412, 182, 1.25M; what is missing or not finite is a dash."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for scale, letter, least in ((1e9, "G", 0.9995e9), (1e6, "M", 0.9995e6), (1e3, "k", 9999.5)):
        if abs(value) >= least:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share of 1 as whole percent."""
    return NOTHING if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """The two largest units: 8.2 s, 4m 05s, 1h 02m, 2d 03h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars from their least to their greatest; what is not finite is a blank."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in shown)
