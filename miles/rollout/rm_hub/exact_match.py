"""A reply and a label in, 1.0 out where they are the same text, white space around them aside, else 0.0."""

from __future__ import annotations


def exact_match(response: str, label: str) -> float:
    return float(response.strip() == label.strip())
