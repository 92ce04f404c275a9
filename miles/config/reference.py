"""The settings and the table of known flags in, the reference page of the command line out.

`python -m miles.config.reference > docs/reference/cli.md` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import Field
from itertools import groupby
from typing import Any

from miles.config import flags
from miles.config.settings import Settings

HEAD = """# Command line

Written by `python -m miles.config.reference`; a test keeps it current. Values come from the flags of `miles train`, from a
YAML file that is named before them (`miles train run.yaml --lr 1e-5`; its keys are the flags without dashes in front), and
from `--custom-config-path`, which wins. A flag that is off or on has a counterpart with `--no-` in front. Flags that start
with `--sglang-`, `--eval-sglang-` and `--router-` and are in no table go to those servers. `--dry-run` prints the command,
checks it and starts nothing.
"""
OTHERS = """
# Flags of other backends and builds

Launch scripts use these too. One without effect is accepted, and one warning names all that were given; the others stop a
run unless they are given their default, or without the flag that gives them their meaning.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD, "\n# Settings\n"]
    for owner in Settings.owners().values():
        rows = [_setting(setting, hint) for setting, hint in flags.hinted(owner)]
        title = (owner.__doc__ or "").splitlines()[0]
        parts.append(f"\n## {title}\n\n" + _table(("flag", "default", "value", "meaning"), rows))
    parts.append(OTHERS)
    for topic, rows_of in groupby(Settings.known_rows(), key=lambda row: row.topic):
        others = [(f"`{r.flag}`", _value(r.field, r.hint), r.kind, r.text) for r in rows_of]
        parts.append(
            f"\n## {topic}\n\n" + _table(("other flag", "value", "state", "why, or what works instead"), others)
        )
    return "".join(parts)


def _setting(setting: Field[Any], hint: Any) -> tuple[str, ...]:
    default = flags.default_of(setting)
    return f"`{flags.flag_name(setting)}`", _shown(default), _value(setting, hint), setting.metadata["help"]


def _shown(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return "unset" if default is None else "off"
    return "none" if default in ((), {}) else f"`{default}`"


def _value(setting: Field[Any], hint: Any) -> str:
    choices = setting.metadata["choices"]
    if choices:
        return ", ".join(choices)
    name = {bool: "", int: "integer", float: "number", str: "text", dict: "JSON object"}[flags.base_type(hint)]
    return f"{name} ..." if flags.is_tuple(hint) else name


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
