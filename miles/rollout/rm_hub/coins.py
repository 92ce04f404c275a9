"""A reply in, 0.0 or 1.0 out with equal chances: rewards that say nothing, as baselines and for trying out a set-up."""

from __future__ import annotations

import random
from hashlib import sha256


def random_reward(response: str, label: str) -> float:
    return float(random.getrandbits(1))


def deterministic_random(response: str, label: str) -> float:
    """The same for the same reply and label, in every process and run."""
    return float(sha256(f"{len(label)}:{label}{response}".encode("utf-8", "surrogatepass")).digest()[0] & 1)
