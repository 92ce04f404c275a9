r"""A reply and an integer in, ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}`` out: DAPO's answer check.

Only the last 300 characters of a reply count, and of those what its last ``Answer:`` line says. Dollar signs, bold
type, a box, a name before an equals sign, thousands commas and a unit after the number are let pass. Source: DAPO
(Yu et al. 2025), whose normalization is Minerva's (Lewkowycz et al. 2022).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from miles.rollout.rm_hub.answers import bare_text, last_boxed, without_end_tokens

WINDOW = 300
"""Characters at the end of a reply that are searched."""
INVALID = "[INVALID]"
"""What stands as ``pred`` where the reply gives no answer."""

_ANSWER = re.compile(r"answer\s*:[\s*]*([^\n]+)", re.IGNORECASE)
_UNIT = (
    "degrees?|dollars?|cents?|percent|units?|points?|pounds?|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|mm|cm|km|kg"
    "|g|m|meters?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|ways?|square|squares|cubic|integers?|students?"
    r"|people|edges?|vertices|solutions?|pairs?|triples?"
)
_NUMBER = re.compile(rf"(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?)(?:\s*(?:\\?%|\^\\circ|{_UNIT})[\s.]*)*", re.IGNORECASE)


def compute_score(solution_str: str, ground_truth: str | int, strict_box_verify: bool = False) -> dict[str, Any]:
    """``strict_box_verify``: the last box in the window is the answer, not the ``Answer:`` line.

    Raises ValueError where the ground truth is no integer: that is a fault of the data, not of the reply.
    """
    truth = _integer(ground_truth)
    window = without_end_tokens(solution_str)[-WINDOW:]
    found = [last_boxed(window)] if strict_box_verify else _ANSWER.findall(window)
    pred = _bare_answer(found[-1]) if found and found[-1] is not None else INVALID
    right = _number(pred) == truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _integer(truth: str | int) -> Fraction:
    value = _number(_bare_answer(str(truth)))
    if value is None or value.denominator != 1:
        raise ValueError(f"the ground truth {truth!r} is no integer")
    return value


def _bare_answer(text: str) -> str:
    boxed = last_boxed(text)
    text = bare_text((text if boxed is None else boxed).strip().strip("*"))
    return bare_text(text.rpartition("=")[2]).replace(r"\$", "").replace("$", "").strip()


def _number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text)
    try:
        return Fraction(match[1].replace(",", "")) if match else None
    except ZeroDivisionError:
        return None
