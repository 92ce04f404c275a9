"""Rows in, prompts out, without end: each epoch draws every row once, in an order that follows from (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.data.cursor import Cursor, Position
from miles.data.jsonl import JsonlFile, Row, RowKeys
from miles.types import Message


@dataclass(frozen=True)
class Prompt:
    """One drawn prompt. ``id`` is its draw number: unique, in drawing order, and the same after a restart."""

    id: int
    epoch: int
    row: int
    prompt: str | list[Message]
    label: str | None
    metadata: dict[str, Any]


class PromptSource:
    """Draws prompts without end; `epoch` and `offset` say how far. A row is parsed when it is drawn.

    Raises ValueError where there are no rows; drawing raises DataError at a row that can't be used.
    """

    def __init__(self, rows: Sequence[Row], *, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._cursor = Cursor(len(rows), shuffle=shuffle, seed=seed)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        input_key: str = "input",
        label_key: str | None = None,
        metadata_key: str = "metadata",
        shuffle: bool = False,
        seed: int = 0,
    ) -> PromptSource:
        """Prompts of a JSONL file. Raises DataError where the file can't be read or has no rows."""
        return cls(JsonlFile(path, RowKeys(input_key, label_key, metadata_key)), shuffle=shuffle, seed=seed)

    @property
    def rows(self) -> int:
        """Prompts per epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def offset(self) -> int:
        return self._cursor.offset

    def next_prompt(self) -> Prompt:
        """The next prompt: one that was given back, else the next row, else the first row of the next epoch."""
        return self._prompt(self._cursor.draw())

    def take(self, count: int) -> list[Prompt]:
        return [self.next_prompt() for _ in range(count)]

    def prompt(self, id: int) -> Prompt:
        """The prompt of a draw number, as it was drawn."""
        return self._prompt(self._cursor.at(id))

    def give_back(self, prompts: Iterable[Prompt]) -> None:
        """Puts prompts at the head: they are drawn next, in this order. Raises ValueError for one that is not out."""
        self._cursor.give_back(p.id for p in prompts)

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Raises SettingsError where file, seed or shuffle changed."""
        self._cursor.load_state_dict(state)

    def _prompt(self, at: Position) -> Prompt:
        row = self._rows[at.row]
        return Prompt(at.draw, at.epoch, at.row, row.prompt, row.label, row.metadata)
