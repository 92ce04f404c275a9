"""The name of a reward type in, what it needs and the function that scores with it out, imported when it is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

from miles.errors import RewardFailed
from miles.hooks import load_function
from miles.rollout.rm_hub.answers import last_boxed

Reward = float | dict[str, Any] | None
Score = Callable[[str, str, Mapping[str, Any]], Reward]
"""(reply, label, metadata) to reward."""

BOXED = "boxed_"
"""A type with this prefix scores what the reply's last box holds; a reply without one is scored as an empty reply."""

_ROOM = "miles.rollout.rm_hub"


@dataclass(frozen=True)
class RmType:
    """One reward type."""

    function: str | None
    """Path of f(reply, label), or of f(reply, label, metadata) where it reads ``metadata``; None: `remote`'s business."""
    cheap: bool = False
    """It takes microseconds on any reply and needs no limit."""
    labelled: bool = True
    """It compares with a label."""
    metadata: tuple[str, ...] = ()
    """The keys of a sample's metadata that it reads; it gets no others."""
    keys: tuple[str, ...] = ()
    """Where its reward is an object: the keys that can be trained."""
    bare: str = "{}"
    """How a reply that is nothing but an answer reads for this type."""


RM_TYPES = {
    "exact_match": RmType(f"{_ROOM}.exact_match.exact_match", cheap=True),
    "math": RmType(f"{_ROOM}.math.math"),
    "dapo": RmType(f"{_ROOM}.math_dapo_utils.compute_score", cheap=True, keys=("score", "acc"), bare="Answer: {}"),
    "deepscaler": RmType(f"{_ROOM}.deepscaler.deepscaler", bare=r"</think>\boxed{{{}}}"),
    "gemma_math": RmType(f"{_ROOM}.gemma_math.gemma_math"),
    "f1": RmType(f"{_ROOM}.f1.f1"),
    "gpqa": RmType(f"{_ROOM}.gpqa.gpqa", metadata=("choices", "correct_letter", "valid_letters")),
    "ifbench": RmType(f"{_ROOM}.ifbench.ifbench", labelled=False, metadata=("instruction_id_list", "kwargs")),
    "reasoning_gym": RmType(f"{_ROOM}.reasoning_gym.reasoning_gym", labelled=False, metadata=("reasoning_gym",)),
    "random": RmType(f"{_ROOM}.coins.random_reward", cheap=True, labelled=False),
    "deterministic_random": RmType(f"{_ROOM}.coins.deterministic_random", cheap=True, labelled=False),
    "remote_rm": RmType(None, labelled=False),
}


def as_reward(value: Any) -> Reward:
    """What a hook or a server gave, as a reward: a finite number, an object (``--reward-key`` names its number), or None.

    Raises ValueError for anything else.
    """
    if value is None or isinstance(value, dict):
        return value
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real) or not math.isfinite(number):
        raise ValueError("a finite number, an object or None works")
    return float(number)


def is_known(rm_type: str) -> bool:
    return rm_type.removeprefix(BOXED) in RM_TYPES


def find(rm_type: str) -> RmType:
    """Raises KeyError for a type that isn't known."""
    return RM_TYPES[rm_type.removeprefix(BOXED)]


def known_types() -> str:
    """The types in words, for messages."""
    return f"{', '.join(RM_TYPES)} (each also as {BOXED}...)"


def judged_part(rm_type: str, response: str) -> str:
    """The reply as its type gets to see it."""
    if not rm_type.startswith(BOXED):
        return response
    boxed = last_boxed(response)
    return find(rm_type).bare.format(boxed) if boxed else ""


@lru_cache(maxsize=2 * len(RM_TYPES))
def score_function(rm_type: str) -> Score:
    """The function behind a type. Raises KeyError where it isn't known, or is scored elsewhere (remote_rm)."""
    kind = find(rm_type)
    if kind.function is None:
        raise KeyError(f"{rm_type} is not scored in this process")
    function = load_function(kind.function)

    def score(response: str, label: str, metadata: Mapping[str, Any]) -> Reward:
        part = judged_part(rm_type, response)
        reward: Reward = function(part, label, metadata) if kind.metadata else function(part, label)
        return reward

    return score


def score_in_place(rm_type: str, response: str, label: str, metadata: Mapping[str, Any]) -> Reward:
    """The reward. Raises RewardFailed whatever goes wrong in reward code."""
    try:
        return score_function(rm_type)(response, label, metadata)
    except Exception as error:  # as in a reward process: no fault of reward code is a reward, none ends the run
        raise RewardFailed(f"{rm_type} failed: {error!r}") from error
