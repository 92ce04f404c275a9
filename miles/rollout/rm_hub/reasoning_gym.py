"""A reply and a reasoning-gym problem in, the score of that problem's own task out, from 0 to 1.

``metadata["reasoning_gym"]`` names the problem, ``{"task", "config", "index"}``, and it is made again from that; or it is
the problem as the library draws it, ``{"question", "answer", "metadata": {"source_dataset", ...}}``, which is then scored
by its task under default settings. The reply's answer stands in its last ``<answer>`` tag, else in its last box, else it
is all that comes after ``</think>``. Source: reasoning-gym (Stojanovski et al. 2025), an optional dependency.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from miles.errors import RewardFailed
from miles.rollout.rm_hub.answers import after_thinking, last_boxed

HOW_TO_INSTALL = 'the package reasoning-gym is not installed; pip install "miles[reasoning-gym]" works'

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def is_installed() -> bool:
    return find_spec("reasoning_gym") is not None


def reasoning_gym(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Raises RewardFailed where the library or the problem is missing."""
    if not is_installed():
        raise RewardFailed(HOW_TO_INSTALL)
    from reasoning_gym import get_score_answer_fn

    problem = metadata.get("reasoning_gym")
    match problem:
        case {"task": task, "config": config, "index": index}:
            problems = _problems(task, json.dumps(config, sort_keys=True))
            return float(problems.score_answer(answer_of(response), problems[index]))
        case {"metadata": {"source_dataset": task}}:
            return float(get_score_answer_fn(task)(answer_of(response), problem))
    raise RewardFailed(
        'metadata["reasoning_gym"] has to be {"task", "config", "index"}, or an entry with metadata["source_dataset"]'
    )


@lru_cache(maxsize=64)
def _problems(task: str, config: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(config))


def answer_of(response: str) -> str:
    solution = after_thinking(response)
    tagged = _TAGGED.findall(solution)
    boxed = last_boxed(solution)
    answer: str = tagged[-1] if tagged else solution if boxed is None else boxed
    return answer.strip()
