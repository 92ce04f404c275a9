r"""A Gemma reply and a label in, right or wrong out: its thoughts are left out, the rest is compared by `math`'s rules.

Thoughts stand between ``<|channel>`` and ``<channel|>``; a reply that is cut off in the middle of one has no answer. A
reply without thoughts is all answer. Source of the format: the chat template of Gemma 4.
"""

from __future__ import annotations

from miles.rollout.rm_hub.math import math

THOUGHT_STARTS, THOUGHT_ENDS = "<|channel>", "<channel|>"


def gemma_math(response: str, label: str) -> float:
    answer = response.rpartition(THOUGHT_ENDS)[2]
    return 0.0 if THOUGHT_STARTS in answer else math(answer, label)
