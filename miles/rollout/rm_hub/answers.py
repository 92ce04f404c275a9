"""A model's reply in, its final answer out: which part of the text counts, and what that part says in LaTeX."""

from __future__ import annotations

import re

THINKING_ENDS, RESPONSE_STARTS = "</think>", "###Response"
_END_TOKEN = re.compile(r"<(?:[|｜][\w▁]+[|｜]|/s|eos|end_of_turn|turn\|)>\Z")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(rf"\\\\|\\[{{}}]|{_BOX.pattern}|[{{}}]")
_MARKED_LINE = re.compile(r"^[ \t]*#{4}[ \t]*(.*)$", re.MULTILINE)
_NUMBER_THEN_PROSE = re.compile(
    r"""^[$€£]?(-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?(?:[ ]*\\?%)?)      # 18  -3  1,000.5  3/4  28%
        (?:[\s.,;:!?]*$ | [\s.,;:!?]+(?!or\b|and\b)[A-Za-z]{2,} | [A-Za-z]{5,}\b(?!\())""",
    re.VERBOSE,
)
_STATED = re.compile(r"\banswer\b[*\s]*(?:is\b|:|=)[*\s:]*(.+)$", re.IGNORECASE | re.MULTILINE)
_COMMANDS = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = "exp|ln|log|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|pi|theta|alpha|beta|gamma"
_FUNCTION_NAME = re.compile(rf"(?<![\\A-Za-z{{])({_FUNCTIONS})(?![A-Za-z])")
_FORMULA_WORD = re.compile(rf"{_FUNCTIONS}|sqrt")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")


def without_end_tokens(text: str) -> str:
    """A reply without the end-of-turn tokens that engines leave in it unless ``--rollout-skip-special-tokens`` is set."""
    text = text.rstrip()
    while match := _END_TOKEN.search(text, max(0, len(text) - 64)):
        text = text[: match.start()].rstrip()
    return text


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``, or all of a reply that has none; without end-of-turn tokens."""
    return without_end_tokens(text.rpartition(THINKING_ENDS)[2])


def last_boxed(text: str) -> str | None:
    r"""What the complete ``\boxed{...}`` that opens last holds, in one pass; None where there is none."""
    open_braces: list[int] = []
    last_start, last_end = 0, 0
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}" and open_braces:
            start = open_braces.pop()
            if start > last_start:
                last_start, last_end = start, match.start()
        elif token == "{":
            open_braces.append(0)
        elif token.startswith((r"\boxed", r"\fbox")):
            open_braces.append(match.end())
    return text[last_start:last_end].strip() if last_start else None


def final_answer(text: str) -> str | None:
    r"""The part of a reply that is its answer; "" where it has none, None where the whole text has to be searched.

    In this order: the last complete box (a reply whose only box is cut off has no answer); the last ``#### answer``
    line, of which a number followed by prose is the answer; what the last "answer is" or "answer:" states; the whole
    text. The last two count only if they are a formula and nothing else.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if _BOX.search(text):
        return ""
    marked = _MARKED_LINE.findall(text)
    if marked:
        number = _NUMBER_THEN_PROSE.match(marked[-1].strip())
        return number.group(1) if number else unwrap(marked[-1])
    for candidate in (stated_answer(text), text):
        formula = unwrap(candidate)
        if is_formula(formula):
            return formula
    return None


def stated_answer(text: str) -> str:
    """What the last "answer is" or "answer:" states, words included; "" where there is none."""
    stated = _STATED.findall(text)
    return stated[-1] if stated else ""


def unwrap(text: str) -> str:
    r"""A text without the ``**...**``, ``$...$``, ``\(...\)`` or ``\[...\]`` around it, nor a full stop at its end."""
    text = text.strip().removesuffix(".").strip().removeprefix("**").removesuffix("**").removesuffix(".").strip()
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(start) : len(text) - len(end)]
        if text.startswith(start) and text.endswith(end) and inner and start not in inner:
            return inner.strip()
    return text


def is_formula(text: str) -> bool:
    """One line without prose: its only words are names of functions."""
    if not text or "\n" in text or "$" in text:
        return False
    return all(_FORMULA_WORD.fullmatch(word) for word in _WORD.findall(_COMMANDS.sub(" ", text)))


def chosen_letter(text: str) -> str | None:
    """The letter of a multiple-choice reply: boxed, stated ("the answer is B"), or the last one in parentheses."""
    answer = final_answer(text)
    for candidate in (answer or "", stated_answer(text)):
        match = re.match(r"^[(\s]*([A-Z])(?:[).:,\s]|$)", bare_text(candidate))
        if match:
            return match.group(1)
    letters = re.findall(r"\(([A-Z])\)", text)
    return letters[-1] if letters and answer is None else None


def bare_text(text: str) -> str:
    r"""A text with its math delimiters, ``\text{}`` wrappers and spacing commands gone: equal answers read equal."""
    text = unwrap(text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\u2212", "-")
    return " ".join(text.split()).removesuffix(".")


def as_latex(answer: str) -> str:
    r"""An answer as LaTeX that math-verify reads: ``exp(16)``, ``x**2``, ``1e-7``, ``∅`` and U+2212 included."""
    text = answer.replace("\u2212", "-").replace("∅", r"\emptyset").replace(r"\varnothing", r"\emptyset")
    text = text.replace("**", "^").replace("π", r"\pi")
    text = re.sub(r"\^\s*(-\d+)", r"^{\1}", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", text)
    text = _SCIENTIFIC.sub(lambda m: rf"{m[1]} \cdot 10^{{{int(m[2])}}}", text)
    return _FUNCTION_NAME.sub(r"\\\1", text)
