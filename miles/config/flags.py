"""Field definitions in, an argument parser and typed values out: a flag is written once, where its setting lives."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

from miles.config.problems import Problems
from miles.errors import SettingsError


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    name: str | None = None,
    positive: bool = False,
) -> Any:
    """A dataclass field that is also a flag. ``name`` overrides ``--field-name``; a bool that defaults to True is
    switched off by its flag. ``positive`` refuses zero and less."""
    metadata = {"help": help, "choices": tuple(choices), "name": name, "positive": positive}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_name(setting: Field[Any]) -> str:
    return setting.metadata["name"] or "--" + setting.name.replace("_", "-")


def default_of(setting: Field[Any]) -> Any:
    return setting.default_factory() if setting.default_factory is not MISSING else setting.default


def flag_fields(owner: type) -> list[Field[Any]]:
    return [f for f in fields(owner) if "help" in f.metadata]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise SettingsError([message])


def build_parser(owners: Sequence[type], prog: str, description: str = "") -> argparse.ArgumentParser:
    """One parser with a group of flags for each owner; values stay text, `convert` types them."""
    parser = _Parser(prog=prog, description=description, argument_default=argparse.SUPPRESS)
    for owner in owners:
        group = parser.add_argument_group((owner.__doc__ or owner.__name__).splitlines()[0])
        hints = typing.get_type_hints(owner)
        for setting in flag_fields(owner):
            text = setting.metadata["help"].replace("%", "%%")
            default = default_of(setting)
            if hints[setting.name] is bool:
                group.add_argument(
                    flag_name(setting), dest=setting.name, action="store_const", const=not default, help=text
                )
                continue
            if default not in (None, (), {}):
                text += f" (default {default})"
            choices = setting.metadata["choices"]
            metavar = "{" + ",".join(choices) + "}" if choices else _base_type(hints[setting.name]).__name__.upper()
            nargs = "+" if _is_tuple(hints[setting.name]) else None
            group.add_argument(flag_name(setting), dest=setting.name, nargs=nargs, metavar=metavar, help=text)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], problems: Problems) -> dict[str, Any]:
    """The flags that were given, as text by field name; unknown ones become problems with the nearest known flag."""
    namespace, unknown = parser.parse_known_args(list(argv))
    known = [s for action in parser._actions for s in action.option_strings]
    for word in unknown:
        if word.startswith("--"):
            name = word.split("=", 1)[0]
            near = difflib.get_close_matches(name, known, n=1)
            problems.add(
                name, "", "no such flag", f"did you mean {near[0]}?" if near else "`miles train --help` lists them"
            )
        elif not any(u.startswith("--") for u in unknown):
            problems.add(word, "", "stands alone, no flag takes it", "give it after its flag")
    return vars(namespace)


def convert(owner: type, given: dict[str, Any], problems: Problems) -> Any:
    """An instance of ``owner`` from the given texts; each value that can't be read becomes a problem."""
    hints = typing.get_type_hints(owner)
    values = {}
    for setting in flag_fields(owner):
        if setting.name in given:
            try:
                values[setting.name] = _typed(setting, hints[setting.name], given[setting.name])
            except ValueError as error:
                problems.add(
                    flag_name(setting), given[setting.name], str(error), _what_works(setting, hints[setting.name])
                )
    return owner(**values)


def _typed(setting: Field[Any], hint: Any, text: Any) -> Any:
    base = _base_type(hint)
    if _is_tuple(hint):
        return tuple(_scalar(base, t) for t in (text if isinstance(text, list) else [text]))
    value = _scalar(base, text)
    choices = setting.metadata["choices"]
    if choices and value not in choices:
        raise ValueError("is none of the choices")
    if setting.metadata["positive"] and value <= 0:
        raise ValueError("must be above 0")
    return value


def _scalar(base: type, text: Any) -> Any:
    if not isinstance(text, str):
        return text
    if base is dict:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("is no JSON object")
        return value
    try:
        value = base(text)
        if base is float and not math.isfinite(value):
            raise ValueError
        return value
    except ValueError:
        raise ValueError(f"is not {'an integer' if base is int else 'a number'}") from None


def _what_works(setting: Field[Any], hint: Any) -> str:
    if setting.metadata["choices"]:
        near = ", ".join(setting.metadata["choices"])
        return f"one of {near} works"
    default = default_of(setting)
    example = {int: "8", float: "0.5", dict: '{"enable_thinking": false}'}.get(_base_type(hint), "text")
    return f"for example {example if default in (None, (), {}) else default} works"


def _base_type(hint: Any) -> type:
    """The scalar behind ``int | None`` or ``tuple[int, ...]``."""
    options = [a for a in typing.get_args(hint) if a not in (types.NoneType, Ellipsis)]
    origin = typing.get_origin(hint)
    if origin is tuple or origin is types.UnionType:
        return _base_type(options[0])
    return typing.cast(type, origin or hint)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple
