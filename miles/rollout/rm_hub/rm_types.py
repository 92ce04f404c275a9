"""The name of a reward type in, the function that scores (reply, label) with it out, imported when it is first wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from miles.hooks import load_function
from miles.rollout.rm_hub.answers import last_boxed

Score = Callable[[str, str], float]

RM_TYPES = {
    "exact_match": "miles.rollout.rm_hub.exact_match.exact_match",
    "math": "miles.rollout.rm_hub.math.math",
}
BOXED = "boxed_"
"""A type with this prefix scores what the reply's last box holds; a reply without one gets 0."""

CHEAP = frozenset({"exact_match"})
"""Types that take microseconds on any reply and need no limit."""


def is_known(rm_type: str) -> bool:
    return rm_type.removeprefix(BOXED) in RM_TYPES


def is_cheap(rm_type: str) -> bool:
    return rm_type.removeprefix(BOXED) in CHEAP


def known_types() -> str:
    """The types in words, for messages."""
    return f"{', '.join(RM_TYPES)} (each also as {BOXED}...)"


@lru_cache(maxsize=2 * len(RM_TYPES))
def score_function(rm_type: str) -> Score:
    """The function behind a known type. Raises KeyError for any other."""
    score: Score = load_function(RM_TYPES[rm_type.removeprefix(BOXED)])
    if not rm_type.startswith(BOXED):
        return score

    def score_boxed(response: str, label: str) -> float:
        boxed = last_boxed(response)
        return 0.0 if boxed is None else score(boxed, label)

    return score_boxed
