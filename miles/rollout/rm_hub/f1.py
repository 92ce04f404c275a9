"""A reply and a label in, the F1 of their words out: 1.0 for the same words, 0.0 for none in common.

Words are compared without case, punctuation and articles. A yes, no or noanswer matches nothing but itself. Source:
SQuAD's evaluation (Rajpurkar et al. 2016) with the closed answers of HotpotQA (Yang et al. 2018).
"""

from __future__ import annotations

import string
from collections import Counter

from miles.rollout.rm_hub.answers import without_end_tokens

_CLOSED = [Counter([word]) for word in ("yes", "no", "noanswer")]
_ARTICLES = ("a", "an", "the")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(response: str, label: str) -> float:
    reply, gold = _words(without_end_tokens(response)), _words(label)
    if reply != gold and (reply in _CLOSED or gold in _CLOSED):
        return 0.0
    common = (reply & gold).total()
    return 2 * common / (reply.total() + gold.total()) if common else 0.0


def _words(text: str) -> Counter[str]:
    words = Counter(text.lower().translate(_NO_PUNCTUATION).split())
    for article in _ARTICLES:
        del words[article]
    return words
