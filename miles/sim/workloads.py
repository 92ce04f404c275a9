"""What prompts ask of engines: how long responses are, in tokens, as a function of seed, prompt and attempt."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class LogNormalLengths:
    """Lengths for `FakeEngine.length`: log-normal around a scale that the samples of a prompt share, itself log-normal.

    ``median_tokens`` is the median over all prompts, ``sigma`` and ``prompt_sigma`` are those of the logarithms within a
    prompt and between prompts; no response is longer than ``cap_tokens``. ``group_size`` tells which samples share a
    prompt.
    """

    median_tokens: float
    sigma: float
    prompt_sigma: float
    cap_tokens: int
    group_size: int
    seed: int = 0

    def __call__(self, payload: dict[str, Any], rng: random.Random) -> int:
        prompt = int(payload["rid"].split(".")[0]) // self.group_size
        length = self.median_tokens * _scale(self.seed, prompt, self.prompt_sigma) * math.exp(rng.gauss(0, self.sigma))
        return max(1, min(self.cap_tokens, round(length)))


@lru_cache(maxsize=4096)
def _scale(seed: int, prompt: int, sigma: float) -> float:
    """How hard a prompt is: what the lengths of its samples are multiplied by."""
    return math.exp(random.Random((seed << 64) ^ (prompt & (1 << 64) - 1)).gauss(0, sigma))
