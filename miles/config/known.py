"""known_flags.json in, one row for each flag that launch scripts of this ecosystem use out.

A row tells what its flag is (type, default, choices) and, in ``kind``, what becomes of it while no field of the settings
bears its name. A flag works by being a field: nothing here has to change for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import Field, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from miles.config.flags import flag

Kind = Literal["setting", "no effect", "not here yet", "needs megatron", "needs sglang"]
HINTS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "json": dict[str, Any]}
LISTS: dict[str, Any] = {"int": tuple[int, ...], "str": tuple[str, ...]}


@dataclass(frozen=True)
class Row:
    """``text``: what works instead, or why there is no effect. ``under``: the flag without which this one says nothing;
    ``idle_in``: the mode in which it says nothing."""

    topic: str
    kind: Kind
    text: str
    under: str | None
    idle_in: str | None
    field: Field[Any]
    hint: Any

    @property
    def flag(self) -> str:
        return str(self.field.metadata["name"])


@cache
def rows() -> tuple[Row, ...]:
    """The whole table, in the order of its topics."""
    groups = json.loads(Path(__file__).with_name("known_flags.json").read_text())
    return tuple(_row(group, *row) for group in groups for row in group["flags"])


def rows_outside(flags: Iterable[str]) -> list[Row]:
    """The rows of flags other than these."""
    inside = set(flags)
    return [row for row in rows() if row.flag not in inside]


def _row(group: dict[str, Any], name: str, kind: str, default: Any, choices: Any = (), nargs: Any = None) -> Row:
    several = nargs not in (None, "?")
    field = flag(tuple(default) if isinstance(default, list) else default, "", choices=choices, name=name, nargs=nargs)
    word = name.removeprefix("--disable-") if default is True else name
    field.name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
    hint = LISTS[kind] if several else HINTS[kind]
    return Row(group["topic"], group["kind"], group["text"], group.get("with"), group.get("idle_in"), field, hint)
