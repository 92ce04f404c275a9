"""A reply and a reasoning-gym entry in, the score of that entry's own task out, from 0 to 1.

``metadata["reasoning_gym"]`` is the entry as the library draws it: ``{"question", "answer", "metadata":
{"source_dataset", ...}}``. The reply's answer stands in its last ``<answer>`` tag, else in its last box, else it is
all that comes after ``</think>``. Source: reasoning-gym (Stojanovski et al. 2025), an optional dependency.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from miles.errors import RewardFailed
from miles.rollout.rm_hub.answers import after_thinking, last_boxed

HOW_TO_INSTALL = 'the package reasoning-gym is not installed; pip install "miles[reasoning-gym]" works'

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def is_installed() -> bool:
    return find_spec("reasoning_gym") is not None


def reasoning_gym(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Raises RewardFailed where the library or the entry is missing."""
    if not is_installed():
        raise RewardFailed(HOW_TO_INSTALL)
    from reasoning_gym import get_score_answer_fn

    entry = metadata.get("reasoning_gym")
    if not isinstance(entry, Mapping) or "source_dataset" not in entry.get("metadata", {}):
        raise RewardFailed('metadata["reasoning_gym"] has to be an entry with metadata["source_dataset"]')
    return float(get_score_answer_fn(entry["metadata"]["source_dataset"])(answer_of(response), entry))


def answer_of(response: str) -> str:
    solution = after_thinking(response)
    tagged = _TAGGED.findall(solution)
    boxed = last_boxed(solution)
    answer: str = tagged[-1] if tagged else solution if boxed is None else boxed
    return answer.strip()
