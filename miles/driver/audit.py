"""A run folder in, a proof of its accounting out: what was issued, trained, given up and wasted, and every violation.

Reads files only, those of a killed run or of one that goes on as well. The laws:

    once        a prompt is trained at most once; a draw that nobody accounts for is missing
    lineages    versions rise by one from that of the lineage's checkpoint; its steps follow each other
    future      no trained token is newer than the version that its step started with, or of weights that a lineage undid
    age         no trained token is older than the staleness bound
    tokens      tokens in the loss of a step = rollout/trained_tokens of the metrics
    steps       a step has as many groups as its record says, and every step before the last is there
    waste       what was not trained was wasted, and the metrics count no more of it than the ledger
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from miles.config.settings import FULLY_ASYNC_PATHS
from miles.errors import LedgerError
from miles.observe.run_folder import STEP, read_metrics
from miles.rollout.ledger_store import FILE


class Violation(NamedTuple):
    """``prompt`` is its draw number; None where the law is about no single prompt."""

    law: str
    prompt: int | None
    what: str


@dataclass(frozen=True)
class Audit:
    """Groups by place and reason, tokens by fate, and what is wrong."""

    groups: dict[str, int]
    tokens: dict[str, int]
    steps: int
    lineages: int
    violations: list[Violation]


def audit(home: Path) -> Audit:
    """Raises LedgerError where there is no ledger, or it can't be read."""
    path = home / FILE
    if not path.is_file():
        raise LedgerError(f"{path} does not exist: no run of miles has recorded its prompts in {home}")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")
            return _Auditor(connection, home).audit()
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: {error}") from error


class _Auditor:
    def __init__(self, connection: sqlite3.Connection, home: Path) -> None:
        self._run = connection.execute
        self._metrics = {int(row[STEP]) - 1: row for row in read_metrics(home / "metrics.jsonl") if STEP in row}
        self._abandoned = read_metrics(home / "metrics.abandoned.jsonl")
        settings = home / "settings.json"
        self._settings: dict[str, Any] = json.loads(settings.read_text()) if settings.exists() else {}

    def audit(self) -> Audit:
        violations = [
            *self._once(), *self._missing(), *self._lineages(), *self._versions(), *self._steps(), *self._tokens(),
            *self._waste(),
        ]  # fmt: skip
        length, trained, masked, wasted = self._run(
            "SELECT total(length), total(trained), total(masked), total(wasted) FROM groups"
        ).fetchone()
        waiting = length - trained - masked
        (lost,) = self._run("SELECT total(lost_tokens) FROM lineages").fetchone()
        return Audit(
            groups=dict(self._run("SELECT place || coalesce(': ' || reason, ''), count(*) FROM groups GROUP BY 1")),
            tokens={
                "sampled": int(length + wasted), "trained": int(trained), "masked": int(masked),
                "waiting": int(waiting), "wasted": int(wasted), "lost in restarts": int(lost),
            },
            steps=self._run("SELECT count(DISTINCT step) FROM groups WHERE place = 'trained'").fetchone()[0],
            lineages=self._run("SELECT count(*) FROM lineages").fetchone()[0],
            violations=violations,
        )  # fmt: skip

    def _once(self) -> Iterator[Violation]:
        rows = self._run(
            "SELECT prompt, count(*), group_concat(step) FROM groups WHERE place = 'trained' AND prompt IS NOT NULL "
            "GROUP BY prompt HAVING count(*) > 1"
        )
        for prompt, times, steps in rows:
            yield Violation("once", prompt, f"trained {times} times, at steps {steps}")
        for (place,) in self._run(
            "SELECT DISTINCT place FROM groups WHERE place NOT IN ('issued', 'finished', 'trained', 'given_up')"
        ):
            yield Violation("once", None, f"{place} is no place that a group can be in")
        for prompt, issue_id in self._run("SELECT prompt, id FROM groups WHERE place = 'given_up' AND reason IS NULL"):
            yield Violation("once", prompt, f"group {issue_id} was given up without a reason")

    def _missing(self) -> Iterator[Violation]:
        """Draws that are in no group; not asked where prompts may be passed over, or a class of the user's draws."""
        data, sampling, rollout = (self._settings.get(name, {}) for name in ("data", "sampling", "rollout"))
        limits = ("rollout_max_prompt_len", "rollout_max_context_len")
        ours = str(data.get("data_source_path", "")).startswith("miles.rollout.data_source.")
        function = rollout.get("rollout_function_path") not in (None, *FULLY_ASYNC_PATHS)
        if not ours or function or any(sampling.get(name) for name in limits):
            return
        expected = 0
        for (prompt,) in self._run("SELECT DISTINCT prompt FROM groups WHERE prompt IS NOT NULL ORDER BY prompt"):
            for missing in range(expected, prompt):
                yield Violation("once", missing, "was drawn and is neither open, trained nor given up")
            expected = prompt + 1

    def _lineages(self) -> Iterator[Violation]:
        for lineage, start, start_version in self._run("SELECT lineage, step, version FROM lineages").fetchall():
            versions = [
                v for (v,) in self._run("SELECT version FROM publications WHERE lineage = ? ORDER BY rowid", (lineage,))
            ]
            expected = list(range(start_version, start_version + len(versions)))
            if versions != expected:
                yield Violation("lineages", None, f"{lineage} published versions {versions}, not {expected}")
            steps = self._run("SELECT step, version FROM steps WHERE lineage = ? ORDER BY step", (lineage,)).fetchall()
            trained = [s for s, _ in steps]
            if trained != list(range(start, start + len(steps))):
                yield Violation("lineages", None, f"{lineage} starts before step {start} and trained {trained}")
            for (_, before), (step, version) in pairwise([(0, start_version), *steps]):
                if version < before:
                    yield Violation("lineages", None, f"{lineage} trained step {step} with {version}, after {before}")

    def _versions(self) -> Iterator[Violation]:
        rows = self._run(
            "SELECT prompt, g.step, oldest, newest, s.version, bound FROM groups g JOIN steps s USING (lineage, step) "
            "JOIN lineages l USING (lineage) WHERE place = 'trained' AND (newest > s.version OR s.version - oldest > bound)"
        )
        for prompt, step, oldest, newest, version, bound in rows:
            if newest > version:
                yield Violation(
                    "future", prompt, f"has tokens of version {newest}, trained at step {step} with {version}"
                )
            if bound is not None and version - oldest > bound:
                yield Violation(
                    "age", prompt, f"is of version {oldest}, trained at step {step} with {version}; bound {bound}"
                )

        rows = self._run(
            "SELECT prompt, g.step, newest, m.lineage, m.version FROM groups g JOIN lineages m "
            "ON m.lineage > g.sampled AND m.lineage <= g.lineage WHERE place = 'trained' AND newest > m.version"
        )
        for prompt, step, newest, lineage, version in rows:
            what = f"has tokens of version {newest}, trained at step {step}; lineage {lineage} went back to {version}"
            yield Violation("future", prompt, what)

    def _steps(self) -> Iterator[Violation]:
        rows = self._run(
            "SELECT g.step, g.lineage, count(*), total(trained), s.groups, s.tokens FROM groups g "
            "LEFT JOIN steps s USING (lineage, step) WHERE place = 'trained' GROUP BY g.step, g.lineage ORDER BY g.step"
        ).fetchall()
        begins = self._run("SELECT step FROM lineages ORDER BY lineage LIMIT 1").fetchone() or (0,)
        for number, (step, lineage, groups, tokens, told_groups, told_tokens) in enumerate(rows, begins[0]):
            if step != number:
                yield Violation("steps", None, f"step {number} is missing, or in two lineages; the next one is {step}")
                return
            if (groups, tokens) != (told_groups, told_tokens):
                yield Violation(
                    "steps", None,
                    f"step {step} of lineage {lineage} has {groups} groups with {tokens:.0f} tokens, and its record says "
                    f"{told_groups} with {told_tokens}",
                )  # fmt: skip

    def _tokens(self) -> Iterator[Violation]:
        rows = self._run("SELECT step, total(trained) FROM groups WHERE place = 'trained' GROUP BY step")
        for step, tokens in rows:
            told = self._metrics.get(step, {}).get("rollout/trained_tokens")
            if told is not None and told != tokens:
                yield Violation(
                    "tokens", None, f"step {step} trained {tokens:.0f} tokens, and the metrics say {told:.0f}"
                )

    def _waste(self) -> Iterator[Violation]:
        rows = self._run(
            "SELECT prompt, place, length, trained, masked, wasted FROM groups WHERE wasted < 0 OR trained < 0 OR masked < 0 "
            "OR (place IN ('issued', 'given_up') AND length != 0) OR (place = 'trained' AND length != trained + masked)"
        )
        for prompt, place, length, trained, masked, wasted in rows:
            yield Violation(
                "waste", prompt,
                f"is {place} with {length} tokens, {trained} trained, {masked} masked and {wasted} wasted",
            )  # fmt: skip
        (wasted,) = self._run("SELECT total(wasted) + (SELECT total(lost_tokens) FROM lineages) FROM groups").fetchone()
        told = sum(row.get("rollout/wasted_tokens", 0.0) for row in [*self._metrics.values(), *self._abandoned])
        if told > wasted:
            yield Violation("waste", None, f"the metrics count {told:.0f} wasted tokens, the ledger {wasted:.0f}")


def shown(result: Audit) -> str:
    """A table for people: groups and tokens by fate, then each violation with its prompt."""
    lines = [f"{result.steps} steps trained, {result.lineages} lineage(s)", ""]
    for title, counts in (("groups", result.groups), ("tokens", result.tokens)):
        lines += [title, *(f"  {name:28}{count:>16,}" for name, count in counts.items()), ""]
    lines.append(f"{len(result.violations)} violation(s)")
    for law, prompt, what in result.violations:
        lines.append(f"  {law}: {'' if prompt is None else f'prompt {prompt} '}{what}")
    return "\n".join(lines) + "\n"
