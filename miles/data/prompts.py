"""Rows in, prompts out, without end: each epoch draws every row once, in an order that follows from (seed, epoch)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config import Settings
from miles.data.cursor import Cursor, Position
from miles.data.limit import PromptLimit
from miles.data.mix import Mix
from miles.data.rows import Row, RowKeys
from miles.errors import DataError
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

    Rows over the ``limit`` are passed over and counted: `skipped` are their draws, `first_skipped` says which was the
    first. They count as drawn, so epochs have the same length with and without a limit. Raises ValueError where there
    are no rows; drawing raises DataError at a row that can't be used, and where a whole epoch has no row that fits.
    """

    def __init__(
        self, rows: Sequence[Row] | Mix, *, shuffle: bool, seed: int, limit: PromptLimit | None = None
    ) -> None:
        self._mix = rows if isinstance(rows, Mix) else Mix([rows], None, shuffle=shuffle, seed=seed)
        self._cursor = Cursor(len(self._mix), shuffle=shuffle, seed=seed, parts=self._mix.identity())
        self._limit = limit
        self._in_row = 0
        self.skipped = 0
        self.first_skipped = ""

    @classmethod
    def open(
        cls, words: Sequence[str], keys: RowKeys, *, shuffle: bool, seed: int, limit: PromptLimit | None = None
    ) -> PromptSource:
        """Prompts of the words of ``--prompt-data``. Raises DataError where one can't be read or has no rows."""
        return cls(Mix.open(words, keys, shuffle=shuffle, seed=seed), shuffle=shuffle, seed=seed, limit=limit)

    @classmethod
    def from_settings(cls, settings: Settings, limit: PromptLimit | None = None) -> PromptSource:
        data = settings.data
        return cls.open(
            data.prompt_data,
            RowKeys.of_training(settings),
            shuffle=data.rollout_shuffle,
            seed=data.rollout_seed,
            limit=limit,
        )

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
        """Prompts of one file. Raises DataError where it can't be read or has no rows."""
        return cls.open([str(path)], RowKeys(input_key, label_key, metadata_key), shuffle=shuffle, seed=seed)

    @property
    def rows(self) -> int:
        """Draws per epoch: the rows of all files."""
        return len(self._mix)

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def offset(self) -> int:
        return self._cursor.offset

    def __len__(self) -> int:
        return self.rows

    def next_prompt(self) -> Prompt:
        """The next prompt: one that was given back, else the next row, else the first row of the next epoch."""
        while True:
            at = self._cursor.draw()
            row = self._mix.row(at.epoch, at.row)
            if self._limit is None or (why := self._limit.refusal(row)) is None:
                self._in_row = 0
                return _prompt(at, row)
            self._skip(why)

    def take(self, count: int) -> list[Prompt]:
        return [self.next_prompt() for _ in range(count)]

    def prompt(self, id: int) -> Prompt:
        """The prompt of a draw number, as it was drawn."""
        at = self._cursor.at(id)
        return _prompt(at, self._mix.row(at.epoch, at.row))

    def give_back(self, prompts: Iterable[Prompt]) -> None:
        """Puts prompts at the head: they are drawn next, in this order. Raises ValueError for one that is not out."""
        self._cursor.give_back(p.id for p in prompts)

    def go_on_after(self, drawn: Collection[int]) -> None:
        """These draws were made since the state was saved: none is drawn again."""
        self._cursor.go_on_after(drawn)

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Raises SettingsError where file, seed or shuffle changed."""
        self._cursor.load_state_dict(state)

    def _skip(self, why: str) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or why
        self._in_row += 1
        if self._in_row >= 2 * self.rows - 1:  # a whole epoch lies in so many draws, wherever they began
            raise DataError(f"no prompt fits: not one in an epoch of {self.rows} draws; {why}")


def _prompt(at: Position, row: Row) -> Prompt:
    return Prompt(at.draw, at.epoch, at.row, row.prompt, row.label, row.metadata)
