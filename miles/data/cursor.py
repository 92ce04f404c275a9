"""A number of rows in, an endless order of (epoch, row) out: what was drawn is one counter and a few exceptions.

Draw ``n`` belongs to epoch ``n // rows``; which row it is follows from (seed, epoch) alone. So a draw number names a
prompt for good, across restarts, and the state that has to be saved is small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from miles.errors import SettingsError

Order = np.ndarray[Any, np.dtype[np.int64]]


@lru_cache(maxsize=4)
def epoch_order(rows: int, seed: int, epoch: int) -> Order:
    """The rows of a shuffled epoch in drawing order: a permutation of ``0..rows-1``, the same on every machine.

    Each row gets 64 random bits from a Philox generator (a stream that numpy guarantees not to change); sorting them is
    the shuffle.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(rows)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class Position:
    """``draw`` counts all draws from 0; ``row`` is a position in the file."""

    draw: int
    epoch: int
    row: int


class Cursor:
    """Draws positions without end; positions that were given back are drawn again first.

    ``parts`` is what else gives a row its meaning: a state is refused where it differs.
    """

    def __init__(self, rows: int, *, shuffle: bool, seed: int, parts: Sequence[Sequence[int]] = ()) -> None:
        if rows < 1:
            raise ValueError("there are no rows to draw from")
        self.rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._parts = [list(part) for part in parts]
        self._drawn = 0
        self._given_back: deque[int] = deque()

    @property
    def epoch(self) -> int:
        """The epoch of the newest draw; an epoch ends with the draw after its last row, not with that row."""
        return max(self._drawn - 1, 0) // self.rows

    @property
    def offset(self) -> int:
        """Rows of `epoch` drawn so far."""
        return self._drawn - self.epoch * self.rows

    def draw(self) -> Position:
        if self._given_back:
            return self.at(self._given_back.popleft())
        self._drawn += 1
        return self.at(self._drawn - 1)

    def at(self, draw: int) -> Position:
        """The position of one draw, whenever it is or was."""
        epoch, place = divmod(draw, self.rows)
        row = int(epoch_order(self.rows, self._seed, epoch)[place]) if self._shuffle else place
        return Position(draw, epoch, row)

    def give_back(self, draws: Iterable[int]) -> None:
        """Puts draws at the head, in this order. Raises ValueError for one that is not out."""
        draws = list(draws)
        waiting = set(self._given_back)
        for draw in draws:
            if not 0 <= draw < self._drawn or draw in waiting:
                raise ValueError(f"draw {draw} is not out: {self._drawn} were drawn, {len(waiting)} wait to be again")
            waiting.add(draw)
        self._given_back.extendleft(reversed(draws))

    def go_on_after(self, drawn: Collection[int]) -> None:
        """These draws are out: the next one comes after the last of them."""
        self._drawn = max(self._drawn, max(drawn, default=-1) + 1)
        self._given_back = deque(draw for draw in self._given_back if draw not in drawn)

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the counter, what was given back, and what gives them their meaning."""
        return {"drawn": self._drawn, "given_back": list(self._given_back)} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Raises SettingsError where its draws would be other rows here."""
        flags = {
            "rows": "--prompt-data",
            "parts": "--prompt-data",
            "seed": "--rollout-seed",
            "shuffle": "--rollout-shuffle",
        }
        changed = [
            f"{flags[name]}: {name} is {value} now and was {state[name]} in the checkpoint, "
            "so prompts would be skipped or repeated; resume with what it was"
            for name, value in self._identity().items()
            if state[name] != value
        ]
        if changed:
            raise SettingsError(changed)
        self._drawn = state["drawn"]
        self._given_back = deque(state["given_back"])

    def _identity(self) -> dict[str, Any]:
        return {"rows": self.rows, "parts": self._parts, "seed": self._seed, "shuffle": self._shuffle}
