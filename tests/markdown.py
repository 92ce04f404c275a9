"""A Markdown document in; its fenced blocks, inline code, tables, drawn trees and shell commands out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; ``line`` is that of its first line in the document."""

    language: str
    body: str
    line: int


def blocks_of(doc: Path) -> list[Block]:
    text = doc.read_text()
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in FENCED.finditer(text)]


def prose_of(doc: Path) -> str:
    """The document without its fenced blocks."""
    return FENCED.sub("", doc.read_text())


def spans_of(doc: Path) -> list[str]:
    """Every piece of inline code."""
    return re.findall(r"`([^`\n]+)`", prose_of(doc))


def tables_of(doc: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table, cells stripped."""
    for table in re.findall(r"(?:^\|.*\n)+", doc.read_text(), re.MULTILINE):
        header, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
        yield header, rows


def tree_of(doc: Path, root: str) -> list[str]:
    """The entries of the drawn folder tree that starts with ``root``, as paths below it; folders end in a slash."""
    [body] = [b.body for b in blocks_of(doc) if b.body.startswith(root)]
    entries: list[str] = []
    parents: list[str] = []
    for prefix, name in re.findall(r"^([│ ]*)[├└]── (\S+)", body, re.MULTILINE):
        parents = [*parents[: len(prefix) // 4], name]
        entries.append("".join(parents))
    return entries


def commands_of(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """(environment, words) of each command of a shell block."""
    for line in block.body.replace("\\\n", " ").splitlines():
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            environment = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
            if words:
                yield environment, words[len(environment) :]


def anchors_of(doc: Path) -> set[str]:
    """What links may name after a ``#``: headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(doc), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
