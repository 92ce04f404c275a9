"""A YAML file in, its keys out, each with its value and the line that it stands on."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.problems import Problems

BASE64 = "base64:"


@dataclass(frozen=True)
class Entry:
    """``text``: the value as the flag would be given it (a bool, a list and an object stay so); ``value``: as YAML means
    it; ``source``: file and line."""

    key: str
    text: Any
    value: Any
    source: str


def read_entries(flag: str, path: str, problems: Problems) -> list[Entry]:
    """The entries of a file, or of YAML text after ``base64:``; keys without a value are left out."""
    works = "a YAML file works: one `key: value` a line"
    read = read_text(flag, path, works, problems)
    return [] if read is None else _parse(flag, *read, problems, works)


def read_text(flag: str, path: str, works: str, problems: Problems) -> tuple[str, str] | None:
    """The name and the text of a file, or of what stands after ``base64:``; None, and a problem, where it can't be read."""
    try:
        if path.startswith(BASE64):
            return "base64", base64.b64decode(path.removeprefix(BASE64), validate=True).decode()
        return path, Path(path).read_text()
    except FileNotFoundError:
        problems.add(flag, path, "there is no such file", works)
    except (OSError, UnicodeDecodeError, binascii.Error) as error:
        problems.add(flag, path, f"can't be read: {getattr(error, 'strerror', None) or error}", works)
    return None


def _parse(flag: str, name: str, content: str, problems: Problems, works: str) -> list[Entry]:
    import yaml

    loader = yaml.SafeLoader(content)
    entries: list[Entry] = []
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            problems.add(flag, name, "holds no `key: value` lines", works)
            return []
        for key, node in root.value:
            value = loader.construct_object(node, deep=True)
            source = f"{name}:{key.start_mark.line + 1}"
            if any(entry.key == str(key.value) for entry in entries):
                problems.add(f"{source} {key.value}", "", "stands in this file twice", "keep one of the two")
            plain = isinstance(node, yaml.ScalarNode) and not isinstance(value, bool)
            if value is not None:
                entries.append(Entry(str(key.value), node.value if plain else value, value, source))
    except yaml.YAMLError as error:
        problems.add(flag, name, " ".join(str(error).split()), works)
    return entries
