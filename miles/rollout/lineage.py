"""A run folder and the point that a run starts from in; its ledger, its data source and what was finished already, out.

Going back to step t opens a new lineage. Kept are finished groups whose newest token is of a version <= v_t and whose age is
within the bound, those trained after t among them; everything else that was issued is issued again, in issue order and
ahead of new prompts. How, depends on who draws prompts:

    a source of ours    the ledger knows every draw: the source goes on after the last one
    a user's source     goes back with its own state, so that what it drew later is forgotten; open prompts are saved
    a user's function   draws itself: it gets back all that isn't trained
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.errors import LedgerError, SettingsError
from miles.rollout.data_source import as_prompt, is_shipped, resume, saved_state
from miles.rollout.ledger import Ledger, OpenGroup
from miles.rollout.ledger_store import FILE, LedgerFile, LedgerStore
from miles.rollout.payload import decode
from miles.rollout.staleness import finished_group, is_stale
from miles.types import FinishedGroup, Group, Sample

SAMPLES_FILE = "rollouts.json"
"""What a checkpoint holds of the rollout side, beside a copy of the ledger."""

Draws = Literal["numbered", "source", "function"]


@dataclass(frozen=True)
class StartingPoint:
    """Before training step ``step`` (from 0), with the weights of ``version``.

    ``folder`` is the checkpoint, None for the first start. Without ``keeps_finished``, everything is sampled again.
    """

    step: int = 0
    version: int = 1
    folder: str | None = None
    keeps_finished: bool = True


@dataclass(frozen=True)
class Row:
    """A group that isn't trained, as the ledger has it."""

    issue_id: int
    prompt: int | None
    attempts: list[int]
    wasted: int


@dataclass(frozen=True)
class Recovered:
    """What a new lineage begins with. ``not_kept`` of ``again`` were finished but can't be kept as they are."""

    lineage: int
    next_id: int
    kept: list[tuple[Row, Group]]
    again: list[Row]
    not_kept: int
    lost_tokens: int


class RolloutState:
    """The ledger of a run and its data source: saved together, resumed together."""

    def __init__(
        self,
        source: Any,
        folder: Path,
        start: StartingPoint,
        *,
        bound: int | None,
        window: int,
        by_function: bool,
        make_store: Callable[[LedgerFile], LedgerStore],
        durable: bool = True,
    ) -> None:
        """Raises LedgerError where the ledger can't be used, SettingsError where the checkpoint can't."""
        self.source = source
        self._draws: Draws = "function" if by_function else "numbered" if is_shipped(source) else "source"
        copy = None if start.folder is None else Path(start.folder) / FILE
        saved = {} if start.folder is None else _read(Path(start.folder) / SAMPLES_FILE)
        self._file = LedgerFile(folder / FILE, copy=copy, durable=durable)
        try:
            recovered = go_back(
                self._file,
                start,
                bound=bound,
                forgets_from=None if self._draws == "numbered" else saved.get("next_id", 0),
                forgets_open=by_function,
            )
            self._resume_source(saved, recovered)
            prompts = self._prompts_of(saved)
            kept = [_open_group(row, prompts(row), results) for row, results in recovered.kept]
            again = [_open_group(row, prompts(row)) for row in recovered.again]
        except BaseException:
            self._file.close()
            raise
        self.ledger = Ledger(window=window, store=make_store(self._file), lineage=recovered.lineage)
        self.ledger.restore(recovered.next_id, kept, again)
        self.recovered = recovered
        self.finished: list[FinishedGroup] = [finished_group(g.issue_id, g.results) for g in kept]

    def _resume_source(self, saved: dict[str, Any], recovered: Recovered) -> None:
        if saved:
            resume(self.source, saved["source"])
        if self._draws == "numbered":
            select = "SELECT prompt FROM groups WHERE id >= ? AND prompt IS NOT NULL"
            later = {n for (n,) in self._file.connection.execute(select, (saved.get("next_id", 0),))}
            self.source.go_on_after(later)

    def _prompts_of(self, saved: dict[str, Any]) -> Callable[[Row], list[Sample]]:
        if self._draws == "numbered":
            return lambda row: self.source.group(row.prompt)
        prompts = {int(i): [Sample(**s) for s in group] for i, group in saved.get("open", {}).items()}

        def of(row: Row) -> list[Sample]:
            if row.issue_id not in prompts:
                raise LedgerError(
                    f"{self._file.path}: group {row.issue_id} is open, but the checkpoint has no prompt of it"
                )
            return prompts[row.issue_id]

        return of

    @property
    def changes(self) -> int:
        """Rows that were written since the start."""
        return self._file.changes

    # ---- checkpoints

    async def save(self, step: int, folder: Path, open_prompts: Sequence[list[Sample]]) -> None:
        """All that a resumed run needs after training step ``step``, into a checkpoint that isn't complete yet.

        ``open_prompts`` are those that a user's function has drawn.
        """
        own = self._draws == "function"
        state = {
            "next_id": self.ledger.next_id,
            "source": saved_state(self.source, step, list(open_prompts) if own else []),
        }
        if self._draws == "source":
            state["open"] = {i: [as_prompt(s) for s in group] for i, group in self.ledger.prompts_by_id().items()}
        text = json.dumps(state)

        def write(file: LedgerFile) -> None:
            file.copy_to(folder / FILE)
            (folder / SAMPLES_FILE).write_text(text)

        await self.ledger.store.after(write)

    async def covered(self, step: int) -> None:
        """The checkpoint after training step ``step`` is complete: payloads of what it has trained can go."""
        self.ledger.covered(step + 1)
        await self.ledger.store.settle()


def go_back(
    file: LedgerFile,
    start: StartingPoint,
    *,
    bound: int | None,
    forgets_from: int | None = None,
    forgets_open: bool = False,
) -> Recovered:
    """Opens a new lineage in one transaction. ``forgets_from``: groups from that number on will be drawn anew.

    With ``forgets_open``, so will all that isn't trained.
    """
    with file.transaction() as connection:
        run = connection.execute
        (lineage,) = run("SELECT coalesce(max(lineage) + 1, 0) FROM lineages").fetchone()
        run(_UNTRAIN, (start.step,))
        lost = _forget(run, forgets_from, forgets_open)
        kept: list[tuple[Row, Group]] = []
        again: list[Row] = []
        not_kept = 0
        for row, place, started, newest, length in _open_rows(run):
            can_be_kept = (
                place == "finished" and start.keeps_finished and newest is not None and newest <= newest_kept(start)
            )
            results = _results(run, row.issue_id) if can_be_kept else None
            not_kept += can_be_kept and results is None
            if results is not None and not is_stale(finished_group(row.issue_id, results), start.version, bound):
                kept.append((row, results))
                continue
            again.append(Row(row.issue_id, row.prompt, _numbers(started), row.wasted + length))
            lost += length
            if place == "finished":
                run(_AGAIN, (lineage, started, length, row.issue_id))
                run("DELETE FROM payloads WHERE id = ?", (row.issue_id,))
        opened = (lineage, start.step, start.version, bound, len(kept), len(again), not_kept, lost)
        run("INSERT INTO lineages VALUES (?, ?, ?, ?, ?, ?, ?, ?)", opened)
        (next_id,) = run("SELECT coalesce(max(id) + 1, 0) FROM groups").fetchone()
    return Recovered(lineage, next_id, kept, again, not_kept, lost)


def newest_kept(start: StartingPoint) -> int:
    """The newest version that a token of a kept group may have: later weights are not those of this lineage."""
    return start.version


Run = Callable[..., sqlite3.Cursor]

_UNTRAIN = """UPDATE groups SET place = 'finished', step = NULL, trained = 0, masked = 0
    WHERE place = 'trained' AND step >= ?"""
_AGAIN = """UPDATE groups SET place = 'issued', lineage = ?, attempts = ?, oldest = NULL, newest = NULL,
    wasted = wasted + ?, length = 0 WHERE id = ?"""


def _forget(run: Run, forgets_from: int | None, forgets_open: bool) -> int:
    """Removes groups that will be drawn anew. Returns the response tokens that are lost with them."""
    which = [f"id >= {forgets_from}"] if forgets_from is not None else []
    which += ["place IN ('issued', 'finished')"] if forgets_open else []
    if not which:
        return 0
    where = " OR ".join(which)
    (lost,) = run(f"SELECT coalesce(sum(length + wasted), 0) FROM groups WHERE {where}").fetchone()
    run(f"DELETE FROM payloads WHERE id IN (SELECT id FROM groups WHERE {where})")
    run(f"DELETE FROM groups WHERE {where}")
    return int(lost)


def _open_rows(run: Run) -> list[tuple[Row, str, str, int | None, int]]:
    """Every open group in issue order, with its place, the attempts that it started with, newest version and length."""
    rows = run(
        "SELECT id, prompt, attempts, wasted, place, started, newest, length FROM groups "
        "WHERE place IN ('issued', 'finished') ORDER BY id"
    )
    return [(Row(i, prompt, _numbers(spent), wasted), *rest) for i, prompt, spent, wasted, *rest in rows]


def _results(run: Run, issue_id: int) -> Group | None:
    """The samples of a finished group; None where they could not be encoded, or a complete checkpoint covered them."""
    (payload,) = run("SELECT (SELECT payload FROM payloads WHERE id = ?)", (issue_id,)).fetchone()
    return None if payload is None else decode(payload)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _open_group(row: Row, prompts: list[Sample], results: Group | None = None) -> OpenGroup:
    attempts = row.attempts if len(row.attempts) == len(prompts) else []
    group = OpenGroup(row.issue_id, prompts, attempts=attempts, wasted=row.wasted)
    if results is not None:
        group.place, group.results = "finished", results
    return group


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise SettingsError([f"--load: {path} is damaged ({error}); an earlier step beside it works"]) from error
    if "next_id" not in state:
        raise SettingsError(
            [f"--load: {path} is of a version of miles that had no ledger; this one can't go on from it"]
        )
    return state
