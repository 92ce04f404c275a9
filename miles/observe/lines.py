"""Evaluations and events go in, one line of words comes out: the same in the live view and in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from miles.observe.metrics import eval_sets
from miles.observe.units import number


def eval_line(step: int, metrics: Mapping[str, float]) -> str:
    """Accuracy and the largest pass@k of each evaluation set."""
    parts = [f"eval of step {step}"]
    for name in eval_sets(metrics):
        head = f"eval/{name}-pass@"
        largest = max((int(key.removeprefix(head)) for key in metrics if key.startswith(head)), default=1)
        parts.append(f"{name} {number(metrics.get(f'eval/{name}'))}")
        parts += [f"pass@{largest} {number(metrics[f'{head}{largest}'])}"] if largest > 1 else []
    return "  ".join(parts)


def event_line(kind: str, fields: Mapping[str, Any]) -> str:
    """The kind of event in words, then the fields that say something."""
    known = {name: number(value) if isinstance(value, float) else value for name, value in fields.items()}
    shown = [f"{name}={value}" for name, value in known.items() if value is not None]
    return "  ".join(" ".join(part.split()) for part in (kind.replace("_", " "), *shown))


def best_line(scores: Mapping[int, float]) -> str:
    """The best score and its step, the first of several; nothing where no score is finite."""
    finite = {step: score for step, score in scores.items() if math.isfinite(score)}
    if not finite:
        return ""
    step = max(finite, key=lambda at: finite[at])
    return f"best {number(finite[step])} at step {step}"
