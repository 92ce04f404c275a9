r"""A reply and a label in, right or wrong out: mathematical answers, compared with math-verify.

Its own time limits are off (they need the main thread and only interrupt Python code): whoever calls this from outside a
`ProcessScorer` worker has to bring a limit. Of a reply, only digits and operators are ever evaluated as Python.

What counts as the answer is `answers.final_answer`'s rule: the last complete box wins, several boxes are not a set. The
label is read the same way, so worked solutions that end in a box or in ``#### 18`` are labels too. Beyond that:

- A label that is one capital letter is a choice. A label of words has to stand, case aside, at the end of the reply's
  answer. Sequences with an ellipsis and clock times such as ``1:00`` are compared as text, since math-verify would make
  numbers of them.
- A percent sign is optional: 28, 0.28 and 28 % all match the label 28 %.
- Decimals are compared after rounding to six places, so 0.1234568 matches 0.1234567; but no rounding and no tiny
  difference makes numbers equal that are more than 0.1 % apart (1/2006! is not 1/2004!).
- Variables stand for positive numbers, so 1/sqrt(n) matches sqrt(1/n), and sqrt(x^2) matches x; |x| doesn't.
- An empty reply or label is never right.

Source: Math-Verify 0.9.0 (huggingface/Math-Verify), whose reports #14, #64 and #69 are answered here.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from itertools import cycle
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (  # type: ignore[import-untyped]
    Abs,
    Expr,
    FiniteSet,
    Rational,
    Tuple,
    UnevaluatedExpr,
    default_sort_key,
    nan,
    oo,
    zoo,
)

from miles.rollout.rm_hub.answers import (
    as_latex,
    bare_text,
    chosen_letter,
    final_answer,
    is_formula,
    unwrap,
    without_end_tokens,
)

logging.getLogger("math_verify").setLevel(logging.ERROR)

TOLERANCE = 1e-3
"""Largest relative difference of two numbers that count as equal."""

_BOXED = [LatexExtractionConfig(boxed_match_priority=0)]
_LETTER = re.compile(r"\(?([A-Z])\)?")
_WORDS = re.compile(r"no|[A-Za-z]{3,}(?:[ -][A-Za-z]+)*", re.IGNORECASE)
_RATIONAL = re.compile(r"(-?)(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+|[1-9]\d{0,2}(?:,\d{3})+)(?:/(\d+)|(\.\d+))?)")
_READ_AS_TEXT = re.compile(r"\\[lc]?dots|\.\.\.|…|^\d{1,2}:\d{2}(?::\d{2})?$")


def math(response: str, label: str) -> float:
    """1.0 where the reply's final answer equals the label's, else 0.0. May run for ever on hostile input."""
    gold = final_answer(label)
    gold = unwrap(label) if gold is None else gold
    response = without_end_tokens(response)
    return float(bool(gold) and bool(response) and _is_right(response, gold))


def _is_right(response: str, gold: str) -> bool:
    gold_text = bare_text(gold)
    letter = _LETTER.fullmatch(gold_text)
    if letter and chosen_letter(response) == letter.group(1):
        return True
    answer = final_answer(response)
    text = bare_text(response if answer is None else answer)
    if _WORDS.fullmatch(gold_text) and not is_formula(gold_text):
        return _last_words(text, gold_text)
    if text == gold_text:
        return True
    if answer == "" or _READ_AS_TEXT.search(gold_text) or _READ_AS_TEXT.search(text):
        return False
    number, gold_number = _rational(text), _rational(gold_text)
    if number is not None and gold_number is not None:
        exact = "." not in text + gold_text
        if exact or number == gold_number or abs(number - gold_number) > TOLERANCE * max(abs(number), abs(gold_number)):
            return number == gold_number
    return _equal(_parse_answer(gold), _parse_text(response) if answer is None else _parse_answer(answer))


def _last_words(text: str, gold: str) -> bool:
    """A word answer stands at the end of what the reply says."""
    return bool(re.search(rf"(?:^|[\s:]){re.escape(gold)}$", text, re.IGNORECASE))


def _rational(text: str) -> Fraction | None:
    """The number that a plain integer, fraction or decimal is: most answers, a thousand times cheaper than parsing."""
    match = _RATIONAL.fullmatch(text)
    if match is None or len(text) > 100:
        return None
    sign, numerator, denominator, whole, divisor, decimals = match.groups()
    below = int(denominator or divisor or 1)
    above = Fraction((numerator or whole).replace(",", "") + (decimals or ""))
    return (-above if sign else above) / below if below else None


@lru_cache(maxsize=1024)
def _parse_answer(answer: str) -> list[Any]:
    """What math-verify reads in a bare answer: a sympy object and the text, or fewer."""
    return parse(rf"\boxed{{{as_latex(answer)}}}", _BOXED, parsing_timeout=None)  # type: ignore[no-any-return]


def _parse_text(text: str) -> list[Any]:
    return parse(text.replace("\u2212", "-"), parsing_timeout=None)  # type: ignore[no-any-return]


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    if not gold or not answer:
        return False
    if any(part.has(zoo, nan) for part in (gold[0], answer[0]) if isinstance(part, Expr)):
        return False
    if verify(gold, answer, timeout_seconds=None):
        return not _far_apart(gold[0], answer[0])
    return _same_for_positive(gold[0], answer[0])


def _far_apart(gold: Any, answer: Any) -> bool:
    """Whether values contradict math-verify's "equal", which it finds by an absolute difference."""
    if isinstance(gold, Tuple | FiniteSet) and isinstance(answer, Tuple | FiniteSet) and len(gold) == len(answer):
        return any(_far_apart(a, b) for a, b in zip(_in_order(gold), _in_order(answer), strict=True))
    pairs = _values(gold, answer)
    scales = (1, 100, Rational(1, 100)) if _has_percent(gold) or _has_percent(answer) else (1,)
    return any(all(abs(a * s - b) > TOLERANCE * max(abs(a * s), abs(b)) for s in scales) for a, b in pairs)


def _same_for_positive(gold: Any, answer: Any) -> bool:
    """Whether two formulas in the same variables agree, to 25 digits, at every point that is tried."""
    if not isinstance(gold, Expr) or not gold.free_symbols or gold.has(Abs) or answer.has(Abs):
        return False
    pairs = _values(gold, answer)
    return bool(pairs) and all(abs(a - b) <= 1e-25 * max(abs(a), abs(b)) for a, b in pairs)


def _values(gold: Any, answer: Any) -> list[tuple[Any, Any]]:
    """Both formulas' values at three points with positive coordinates; none where a value is no finite number."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols != answer.free_symbols:
        return []
    symbols = sorted(gold.free_symbols, key=default_sort_key)
    pairs = []
    for numerators in ((17, 29, 43), (31, 53, 11), (5, 67, 37))[: 3 if symbols else 1]:
        point = {s: Rational(n, 13) + i for i, (s, n) in enumerate(zip(symbols, cycle(numerators), strict=False))}
        a, b = (formula.subs(point).doit().evalf(30) for formula in (gold, answer))
        if not (a.is_Number and b.is_Number) or {a, b} & {oo, -oo}:
            return []
        pairs.append((a, b))
    return pairs


def _in_order(elements: Any) -> list[Any]:
    if isinstance(elements, Tuple):
        return list(elements.args)
    return sorted(elements.args, key=lambda e: default_sort_key(e.evalf()))


def _has_percent(formula: Any) -> bool:
    return isinstance(formula, Expr) and formula.has(UnevaluatedExpr)
