"""A reply to a multiple-choice question in, 1.0 out where it chooses the right letter, else 0.0.

The right one is ``metadata["correct_letter"]``, else the label: a letter, or the text of one of ``metadata["choices"]``
(a list, or an object by letter). The reply's choice is what its last box, its last "answer is ..." or its last "(X)"
names, after its thinking; the text of a choice works for its letter. ``metadata["valid_letters"]`` are the letters that
can be chosen (unset: those of the choices, else A to D).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.rollout.rm_hub.answers import after_thinking, bare_text, chosen_letter, final_answer, stated_answer

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def gpqa(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Raises ValueError where no letter is right: that is a fault of the data, not of the reply."""
    choices = _choices(metadata.get("choices") or ())
    valid = [str(v).upper() for v in metadata.get("valid_letters") or choices or "ABCD"]
    right = _letter_of(str(metadata.get("correct_letter") or label), choices, valid)
    if right is None:
        raise ValueError(f"the label {label!r} is none of the choices {', '.join(valid)}")
    reply = after_thinking(response)
    return float(_chosen(reply, choices, valid) == right)


def _choices(choices: Any) -> dict[str, str]:
    pairs = choices.items() if isinstance(choices, Mapping) else zip(_LETTERS, choices, strict=False)
    return {str(letter).upper(): _plain(str(text)) for letter, text in pairs}


def _chosen(reply: str, choices: Mapping[str, str], valid: list[str]) -> str | None:
    letter = chosen_letter(reply)
    if letter in valid:
        return letter
    return _letter_of(final_answer(reply) or stated_answer(reply) or reply, choices, valid)


def _letter_of(text: str, choices: Mapping[str, str], valid: list[str]) -> str | None:
    """The letter that a text is, or whose choice it says."""
    plain = _plain(text)
    letter = plain.strip("().: ").upper()
    if letter in valid:
        return letter
    return next((letter for letter, choice in choices.items() if choice == plain and letter in valid), None)


def _plain(text: str) -> str:
    return bare_text(text).casefold()
