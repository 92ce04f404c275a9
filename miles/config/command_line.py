"""A command line and the files it names in; what was given out, by field name, with where it came from.

`run.yaml` and `--custom-config-path` are command lines written another way: each entry becomes words and goes through the
same parser. What comes later wins: the file, the flags, the custom config.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.config import flags, known
from miles.config.problems import Problems
from miles.config.yaml_file import Entry, read_entries
from miles.errors import HookError, SettingsError
from miles.hooks import hook_failed, load_function

RUN_FILES = (".yaml", ".yml")
SERVERS = ("sglang", "eval-sglang", "router")
SERVER_FLAGS = tuple(f"--{no}{server}-" for no in ("", "no-") for server in SERVERS)
FUNCTION_PATHS = ("rollout_function_path", "custom_generate_function_path")
Passed = str | bool | tuple[str, ...]


@dataclass
class Given:
    """``values`` and ``sources`` by field name; ``passthrough``: servers' flags with their values, True without one;
    ``attributes``: what is for hooks alone."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    passthrough: dict[str, Passed] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def build_parser(owners: Sequence[type], prog: str) -> argparse.ArgumentParser:
    """A parser of settings; the known flags that are none are hidden in its help."""
    return _with_known(flags.build_parser(owners, prog))


def _with_known(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for row in known.rows_outside(parser._option_string_actions):
        flags.add_flag(parser, row.field, row.hint)
    return parser


def read(argv: Sequence[str], owners: Sequence[type], problems: Problems) -> Given:
    """Everything that was given; unknown flags and keys become problems with the nearest known one.

    Raises SettingsError at once for a YAML file that can't be read: what would be said besides may only be missing there.
    """
    words = list(argv)
    file = _pop_run_file(words)
    entries = read_entries("", file, problems) if file else []
    if not entries:
        problems.raise_all()
    parser = build_parser(owners, "miles train")
    custom: list[Entry] = []
    path = _take(parser, entries, words, custom, Problems()).values.get("custom_config_path")
    if path is not None:
        custom = read_entries("--custom-config-path", path, problems)
    draft = _take(parser, entries, words, custom, Problems())
    functions = [(name, draft.values[name]) for name in FUNCTION_PATHS if name in draft.values]
    parser, own = _with_users_flags(parser, owners, functions, problems)
    given = _take(parser, entries, words, custom, problems)
    for name, (default, needed) in own.items():
        if needed and name not in given.values:
            problems.add(
                needed, None, "a function that is named by its path needs it", "a value of that function's works"
            )
        given.attributes[name] = given.values.pop(name, default)
        given.sources.pop(name, None)
    return given


def _pop_run_file(words: list[str]) -> str | None:
    """Takes the YAML file with settings out of the words: the first one, or the value of --config."""
    if words and words[0].endswith(RUN_FILES):
        return words.pop(0)
    for at, word in enumerate(words):
        if word == "--config" and at + 1 < len(words):
            del words[at]
            return words.pop(at)
        if word.startswith("--config="):
            return words.pop(at).removeprefix("--config=")
    return None


# ---- flags that functions bring


def _with_users_flags(
    parser: argparse.ArgumentParser, owners: Sequence[type], functions: Iterable[tuple[str, str]], problems: Problems
) -> tuple[argparse.ArgumentParser, dict[str, tuple[Any, str | None]]]:
    """The parser with what each function's ``add_arguments`` adds; of that, the defaults and the flags that it needs."""
    adders = [(name, path, adder) for name, path in functions if (adder := _adder(path)) is not None]
    if not adders:
        return parser, {}
    parser = flags.build_parser(owners, "miles train")
    before = len(parser._actions)
    for name, path, adder in adders:
        try:
            adder(parser)
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            flag = "--" + name.replace("_", "-")
            problems.add(flag, path, str(hook_failed(path, adder, error, "its add_arguments")), "correct it there")
    own = {}
    for action in parser._actions[before:]:
        default = None if action.default is argparse.SUPPRESS else action.default
        if isinstance(default, str) and callable(action.type):
            default = action.type(default)
        own[action.dest] = (default, action.option_strings[0] if action.required else None)
        action.default, action.required = argparse.SUPPRESS, False
    return _with_known(parser), own


def _adder(path: str) -> Any:
    try:
        return getattr(load_function(path), "add_arguments", None)
    except HookError:  # the rollout room's problem, which its check reports
        return None


# ---- words


def _take(
    parser: argparse.ArgumentParser,
    entries: Sequence[Entry],
    words: list[str],
    custom: Sequence[Entry],
    problems: Problems,
) -> Given:
    given = Given()
    keys = [option.removeprefix("--") for option in _options(parser)]
    for entry in entries:
        if not _take_entry(given, parser, entry, problems):
            near = flags.nearest(entry.key, keys, "`miles train --help` lists the flags, which are the keys")
            problems.add(f"{entry.source} {entry.key}", "", "no such setting", near)
    _report_unknown(_take_words(given, parser, words, flags.FLAG, problems), parser, problems)
    for entry in custom:
        before = dict(given.values)
        if not _take_entry(given, parser, entry, problems):
            given.attributes[entry.key.replace("-", "_")] = entry.value
        for name in before.keys() & given.values.keys():
            if given.sources[name] == entry.source:
                problems.note(f"{entry.source}: {entry.key} {entry.value} overrides {before[name]}")
    return given


def _take_entry(given: Given, parser: argparse.ArgumentParser, entry: Entry, problems: Problems) -> bool:
    """Adds an entry of a file. Returns whether there is a setting of exactly this name, or a server to take it."""
    words = _words_of(entry, parser)
    name = words[0].partition("=")[0]
    if name not in parser._option_string_actions and not name.startswith(SERVER_FLAGS):
        return False
    if _take_words(given, parser, words, entry.source, problems):
        problems.add(f"{entry.source} {entry.key}", entry.value, "is more than the flag takes", "one value works")
    return True


def _parsed(
    parser: argparse.ArgumentParser, words: list[str], problems: Problems
) -> tuple[argparse.Namespace, list[str]]:
    """What the parser makes of the words, without the flags that it can't use, each of which is a problem."""
    while True:
        try:
            return parser.parse_known_args(words)
        except SettingsError as error:
            refused = re.match(r"argument (--[\w-]+)(?:/\S+)?: (.*)", error.problems[0])
            kept = [w for w in words if not refused or w.partition("=")[0] != refused[1]]
            if refused is None or kept == words:
                raise
            problems.add(refused[1], "", refused[2], "`miles train --help` says what it takes")
            words = kept


def _take_words(
    given: Given, parser: argparse.ArgumentParser, words: Sequence[str], source: str, problems: Problems
) -> list[str]:
    """Adds what the words give. Returns the words that nothing takes."""
    own, passed = _split(words, parser)
    given.passthrough |= passed
    found, unknown = _parsed(parser, own, problems)
    given.values |= vars(found)
    given.sources |= dict.fromkeys([*vars(found), *passed], source)
    return unknown


def _split(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], dict[str, Passed]]:
    """The words for our parser, and the flags of servers."""
    own: list[str] = []
    passed: dict[str, list[str]] = {}
    target = own
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name.startswith(SERVER_FLAGS) and name not in parser._option_string_actions:
                target = passed[name] = [value] if equals else []
                continue
            target = own
        target.append(word)
    return own, {name: values[0] if len(values) == 1 else tuple(values) or True for name, values in passed.items()}


def _words_of(entry: Entry, parser: argparse.ArgumentParser) -> list[str]:
    option, value = "--" + entry.key.replace("_", "-"), entry.text
    if isinstance(value, bool):
        if option not in parser._option_string_actions:
            dest = entry.key.replace("-", "_")
            named = [a.option_strings[0] for a in parser._actions if a.dest == dest and a.const is value]
            if named:
                return named[:1]
        return [option if value else f"--no-{option[2:]}"]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={json.dumps(value) if isinstance(value, dict) else value}"]


def _report_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser, problems: Problems) -> None:
    for word in unknown:
        if word.startswith("--"):
            name = word.split("=", 1)[0]
            near = flags.nearest(name, _options(parser), "`miles train --help` lists them")
            problems.add(name, "", "no such flag", near)
        elif not any(u.startswith("--") for u in unknown):
            problems.add(word, "", "stands alone, no flag takes it", "give it after its flag")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The names of flags, without those that say the opposite of another."""
    names = parser._option_string_actions
    return (
        name
        for name in names
        if name.startswith("--") and "--" + name.removeprefix("--no-") not in names.keys() - {name}
    )
