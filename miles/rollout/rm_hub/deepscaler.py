r"""A reply that thinks first and a label in, right or wrong out: what comes after the thinking has to end in a box.

The answer is the last complete box after the last ``</think>``, or, where there is none, after the last ``###Response``.
A reply with neither, or without a box there, gets 0; a model that doesn't think is for type `math`. Answers are compared
by `math`'s rules. Source of the format: DeepScaleR (Luo et al. 2025).
"""

from __future__ import annotations

from miles.rollout.rm_hub.answers import RESPONSE_STARTS, THINKING_ENDS, last_boxed
from miles.rollout.rm_hub.math import math


def deepscaler(response: str, label: str) -> float:
    for marker in (THINKING_ENDS, RESPONSE_STARTS):
        _, found, solution = response.rpartition(marker)
        if found:
            boxed = last_boxed(solution)
            return 0.0 if boxed is None else math(rf"\boxed{{{boxed}}}", label)
    return 0.0
