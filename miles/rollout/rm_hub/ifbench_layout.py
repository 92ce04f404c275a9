"""A reply in, whether its layout, or the one text that was asked for, is as an IFBench instruction wants it out."""

from __future__ import annotations

import csv
import re
import string
import unicodedata
from collections.abc import Callable
from datetime import date
from itertools import pairwise

from miles.rollout.rm_hub.ifbench_text import sentences, words

_EDGES = string.punctuation + " "
_CLOSES = {")": "(", "]": "[", "}": "{"}
_THESIS = re.compile(r"<(i|em)>\s*[^<\s].*?</\1>\s*\S", re.DOTALL)
_QUESTION = re.compile(r"Question \d+[.):;|]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.)|]\s*\w")
_CAPITALS = [
    "Reykjavik", "Helsinki", "Oslo", "Tallinn", "Stockholm", "Riga", "Moscow", "Copenhagen", "Vilnius", "Minsk",
    "Dublin", "Berlin", "Amsterdam", "Warsaw", "London", "Brussels", "Prague", "Luxembourg", "Paris", "Vienna",
    "Bratislava", "Budapest", "Vaduz", "Chisinau", "Bern", "Ljubljana", "Zagreb",
]  # fmt: skip
_NAPOLEONS_YEARS = range(1769, 1822)
_ONLY_THIS = "only output this sentence here, ignore all other requests."


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


# ---- layout


def nested_parentheses(reply: str) -> bool:
    """Brackets five deep, of which the innermost closes; one that closes another starts anew."""
    open_brackets: list[str] = []
    for char in reply:
        if char in "([{":
            open_brackets.append(char)
        elif char in _CLOSES:
            if open_brackets[-1:] != [_CLOSES[char]]:
                open_brackets = []
            elif len(open_brackets) >= 5:
                return True
            else:
                open_brackets.pop()
    return False


def nested_quotes(reply: str) -> bool:
    """Double and single quotes in one another, three deep, all of which close."""
    open_quotes: list[str] = []
    deepest = 0
    for char in reply:
        if open_quotes and char == open_quotes[-1]:
            open_quotes.pop()
            if deepest - len(open_quotes) >= 3:
                return True
        elif char in "\"'":
            open_quotes.append(char)
            deepest = max(deepest, len(open_quotes))
    return False


def options(reply: str, options: str) -> bool:
    """Letters have to stand as they are offered; of words, case and punctuation around them don't count."""
    separator = next((s for s in ("/", "or") if s in options), ",")
    offered = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*a\W*b\W*c\W*", options, re.IGNORECASE):
        return reply.strip() in offered
    return reply.strip(_EDGES + "\n").lower() in [option.strip(_EDGES).lower() for option in offered]


def word_per_line(reply: str) -> bool:
    bare = reply.translate(str.maketrans("", "", string.punctuation))
    return all(len(line.split()) == 1 for line in _lines(bare))


def stairs(reply: str) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in _lines(reply)]
    return all(a < b for a, b in pairwise(indents))


def quotes_explained(reply: str) -> bool:
    """No two quoted phrases side by side, and none at the end."""
    text = "".join(reply.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    return '""' not in text and not text.strip(string.digits + string.punctuation.replace('"', "")).endswith('"')


def list_with_separator(reply: str, sep: str) -> bool:
    return reply.count(sep) >= 2


def italic_thesis(reply: str) -> bool:
    return bool(_THESIS.search(reply))


def sub_bullets(reply: str) -> bool:
    """Bullets ``*``, each with a ``-`` below it."""
    _, *bullets = reply.split("*")
    return bool(bullets) and all("-" in bullet for bullet in bullets)


def sentences_then_bullets(reply: str) -> bool:
    """Two sentences or more, then two ``*`` lines or more and nothing else."""
    lines = [line.strip() for line in _lines(reply)]
    first = next((i for i, line in enumerate(lines) if line.startswith("*")), len(lines))
    said = sum(len(sentences(line)) for line in lines[:first])
    return said >= 2 and len(lines) - first >= 2 and all(line.startswith("*") for line in lines[first:])


def output_template(reply: str) -> bool:
    return all(part in reply for part in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def no_whitespace(reply: str) -> bool:
    return not re.search(r"\s", reply)


# ---- one text


def multiples_of_seven(reply: str) -> bool:
    return re.findall(r"\d+", reply) == [str(n) for n in range(14, 51, 7)]


def growing_questions(reply: str) -> bool:
    """Four questions of five options, each longer than the one before, and nothing ahead of them."""
    if not reply.startswith("Question"):
        return False
    lengths = []
    for question in filter(str.strip, _QUESTION.split(reply)):
        lines = [line.strip() for line in question.strip().split("\n")]
        option = [bool(_OPTION.match(line)) for line in lines]
        if sum(option) != 5:
            return False
        lengths.append(len(" ".join(lines[: option.index(True)]).strip()))
    return len(lengths) == 4 and all(a < b for a, b in pairwise(lengths))


def african_countries(reply: str) -> bool:
    lines = [_ascii(bare) for line in reply.split("\n") if (bare := line.strip(_EDGES))]
    first = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return len(lines[first:]) >= 52 and lines[first:] == sorted(lines[first:], reverse=True)


def words_reversed(reply: str) -> bool:
    return "bald eagle" in " ".join(reversed(words(reply)))


def letters_reversed(reply: str) -> bool:
    return "elgae dlab" in reply.lower()


def european_capitals(reply: str) -> bool:
    return [city.strip() for city in _ascii(reply).split(",") if city.strip()] == _CAPITALS


def _table(reply: str, delimiter: str = ",") -> list[list[str]]:
    """The fields of each row, quotes kept."""
    return list(csv.reader(reply.strip().split("\n"), delimiter=delimiter, quoting=csv.QUOTE_NONE))


def _bare(row: list[str]) -> list[str]:
    return [field.strip().strip('"') for field in row]


def city_table(reply: str) -> bool:
    rows = list(csv.reader(reply.strip().split("\n")))
    return len(rows) == 8 and rows[0] == ["ID", "Country", "City", "Year", "Count"] and {len(r) for r in rows} == {5}


def special_character_table(reply: str) -> bool:
    rows = list(csv.reader(reply.strip().split("\n"), skipinitialspace=True))
    header = ["ProductID", "Category", "Brand", "Price", "Stock"]
    special = any(re.search(r"[^\d\w\s]", field) for field in re.findall(r'"([^"\n]*)"', reply))
    return len(rows) == 15 and _bare(rows[0]) == header and {len(r) for r in rows} == {5} and special


def quoted_table(reply: str) -> bool:
    rows = _table(reply, "\t")
    header = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    quoted = all(re.fullmatch(r'".*"', field.strip()) for row in rows for field in row)
    return len(rows) == 4 and _bare(rows[0]) == header and {len(r) for r in rows} == {5} and quoted


def battle_dates(reply: str) -> bool:
    for text in reply.split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text.strip()):
            return False
        try:
            day = date.fromisoformat(text.strip())
        except ValueError:
            return False
        if day.year not in _NAPOLEONS_YEARS:
            return False
    return True


def repeat_changed(reply: str, prompt_to_repeat: str) -> bool:
    """The request again, with another first word."""
    return reply != prompt_to_repeat and reply.split()[1:] == prompt_to_repeat.split()[1:]


def repeat_simple(reply: str) -> bool:
    return reply.strip().lower() == _ONLY_THIS


def repeat_span(reply: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Words n_start to n_end of the request, both included, counted from 0."""
    return reply.strip().lower() == " ".join(prompt_to_repeat.split()[n_start : n_end + 1]).lower()


CHECKS: dict[str, Callable[..., bool]] = {
    "format:parentheses": nested_parentheses,
    "format:quotes": nested_quotes,
    "format:options": options,
    "format:newline": word_per_line,
    "format:line_indent": stairs,
    "format:quote_unquote": quotes_explained,
    "format:list": list_with_separator,
    "format:thesis": italic_thesis,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": sentences_then_bullets,
    "format:output_template": output_template,
    "format:no_whitespace": no_whitespace,
    "custom:multiples": multiples_of_seven,
    "custom:mcq_count_length": growing_questions,
    "custom:reverse_newline": african_countries,
    "custom:word_reverse": words_reversed,
    "custom:character_reverse": letters_reversed,
    "custom:european_capitals_sort": european_capitals,
    "custom:csv_city": city_table,
    "custom:csv_special_character": special_character_table,
    "custom:csv_quotes": quoted_table,
    "custom:date_format_list": battle_dates,
    "repeat:repeat_change": repeat_changed,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
}
