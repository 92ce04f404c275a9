"""Transitions of groups go in, in order; one SQLite file (WAL) that survives any kill comes out.

    issue ─▶ finish (with the payload) ─▶ commit of a step ─▶ cover: a complete checkpoint holds it, the payload goes
       ▲        │
       └ again ─┘      any of these ─▶ give_up

What one call of `LedgerStore.write` is told is written as one transaction or not at all, never before what was told earlier.
A kill loses at most the last calls; what it loses was never issued, finished or trained as far as the ledger knows.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles.errors import LedgerError

FILE, LOCK, FORMAT = "ledger.sqlite", "ledger.lock", 1
PAGE_BYTES = 16384
"""A payload is tens of kilobytes: large pages write it in few pieces."""

Statement = tuple[str, Sequence[Any]]

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE lineages (
    lineage INTEGER PRIMARY KEY, step INTEGER, version INTEGER, bound INTEGER, kept INTEGER, again INTEGER,
    not_kept INTEGER, lost_tokens INTEGER);
CREATE TABLE publications (lineage INTEGER, version INTEGER);
CREATE TABLE steps (
    lineage INTEGER, step INTEGER, version INTEGER, groups INTEGER, tokens INTEGER,
    PRIMARY KEY (lineage, step)) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, prompt INTEGER, lineage INTEGER, place TEXT, reason TEXT, step INTEGER, started TEXT,
    attempts TEXT, sampled INTEGER, oldest INTEGER, newest INTEGER, length INTEGER DEFAULT 0, trained INTEGER DEFAULT 0,
    masked INTEGER DEFAULT 0, wasted INTEGER DEFAULT 0);
CREATE INDEX open_groups ON groups (id) WHERE place IN ('issued', 'finished');
CREATE INDEX trained_groups ON groups (step) WHERE place = 'trained';
CREATE TABLE payloads (id INTEGER PRIMARY KEY, payload BLOB);
"""
"""``lineage`` of a group: in which it came to its place; ``sampled``: in which it was finished. ``started``: attempts of
each sample that were counted before the group was issued (again), ``attempts``: by now. ``length``: response tokens of what
is finished or trained, ``trained`` and ``masked`` those in and out of the loss, ``wasted`` what was sampled besides.
``oldest``: version of the oldest token, once trained of the oldest one in the loss. ``bound`` is K; ``step`` is from 0."""


class LedgerStore(Protocol):
    """Where a ledger writes. `run` must be running while the rest is used."""

    def write(self, *statements: Statement) -> None:
        """Tells one transition. Never waits."""

    async def settle(self) -> None:
        """Waits until all that was told is written. Raises LedgerError."""

    async def after(self, work: Callable[[LedgerFile], None]) -> None:
        """Does ``work`` where files are written, once all that was told is. Raises LedgerError."""

    async def run(self) -> None:
        """Until cancelled. Raises LedgerError as soon as something can't be written."""

    def close(self) -> None:
        """Writes what is left and closes the file. Twice is fine."""


class NoStore:
    """Keeps nothing: a ledger of callers that have no run folder."""

    def write(self, *statements: Statement) -> None: ...

    async def settle(self) -> None: ...

    async def after(self, work: Callable[[LedgerFile], None]) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None: ...


class PlaceStore:
    """Writes in place, where the event loop has no threads: whenever ``batch`` transitions wait, and on `settle`.

    ``batch`` is how far a writer thread may lag behind, so that virtual time can kill a run in between.
    """

    def __init__(self, file: LedgerFile, batch: int = 1) -> None:
        self._file = file
        self._batch = batch
        self._told: list[Sequence[Statement]] = []

    def write(self, *statements: Statement) -> None:
        self._told.append(statements)
        if len(self._told) >= self._batch:
            self._flush()

    def _flush(self) -> None:
        told, self._told = self._told, []
        self._file.write(told)

    async def settle(self) -> None:
        await asyncio.sleep(0)
        self._flush()
        await asyncio.sleep(0)

    async def after(self, work: Callable[[LedgerFile], None]) -> None:
        await self.settle()
        work(self._file)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        self._flush()
        self._file.close()


@dataclass
class _Asked:
    """Work for the writer's thread, done after all that was told before; ``done`` is told how it ended."""

    work: Callable[[], None]
    done: asyncio.Future[None]


class _Close:
    """The last job."""


MOST_PER_TRANSACTION = 256


class ThreadStore:
    """Writes on a thread of its own: everything that waits goes into one transaction.

    Bounded by its caller: a step's commit settles, so that no more than a step's transitions ever wait.
    """

    def __init__(self, file: LedgerFile) -> None:
        self._file = file
        self._jobs: queue.SimpleQueue[Sequence[Statement] | _Asked | _Close] = queue.SimpleQueue()
        self._failure: LedgerError | None = None
        self._failed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def write(self, *statements: Statement) -> None:
        self._jobs.put(statements)

    async def settle(self) -> None:
        await self.after(lambda file: None)

    async def after(self, work: Callable[[LedgerFile], None]) -> None:
        asked = _Asked(lambda: work(self._file), self._loop.create_future())
        self._jobs.put(asked)
        await asked.done

    async def run(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(_Close())
            self._thread.join()
        self._file.close()

    # ---- on the thread

    def _work(self) -> None:
        while True:
            told: list[Sequence[Statement]] = []
            job = self._jobs.get()
            while not isinstance(job, _Asked | _Close):
                told.append(job)
                if self._jobs.empty() or len(told) == MOST_PER_TRANSACTION:
                    break
                job = self._jobs.get()
            self._try(lambda told=told: self._file.write(told))  # type: ignore[misc]
            if isinstance(job, _Asked):
                self._try(job.work)
                self._tell(_resolve, job.done, self._failure)
            elif isinstance(job, _Close):
                return

    def _try(self, work: Callable[[], None]) -> None:
        """Nothing is written any more after the first failure: what follows would not fit to what is missing."""
        if self._failure is not None:
            return
        try:
            work()
        except LedgerError as error:
            self._failure = error
        except Exception as error:  # invariant: whoever waits for the thread learns that it can't go on
            self._failure = LedgerError(f"{self._file.path}: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if self._failure is not None:
            self._tell(self._failed.set)

    def _tell(self, what: Callable[..., Any], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *args)


def _resolve(done: asyncio.Future[None], failure: LedgerError | None) -> None:
    if not done.done():
        done.set_result(None) if failure is None else done.set_exception(failure)


class LedgerFile:
    """The file, held by one process at a time; every error of it is a LedgerError that says what to do.

    ``copy`` is that of the checkpoint that the run goes back to: it takes the place of a file that doesn't go on from it.
    ``durable`` False leaves out what only a power cut needs; a killed process loses nothing by it.
    """

    def __init__(self, path: Path, *, copy: Path | None = None, durable: bool = True) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _held(path.with_name(LOCK))
        try:
            if copy is not None and copy.exists() and not _goes_on_from(path, copy):
                _replace(path, copy)
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._open(durable)
        except sqlite3.Error as error:
            self.close()
            raise self._explained(error) from error
        except LedgerError:
            self.close()
            raise

    def _open(self, durable: bool) -> None:
        run = self.connection.execute
        run(f"PRAGMA page_size = {PAGE_BYTES}")
        run("PRAGMA journal_mode = WAL")
        run(f"PRAGMA synchronous = {'NORMAL' if durable else 'OFF'}")
        if run("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check found damage")
        if not run("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            values = f"('id', '{secrets.token_hex(8)}'), ('format', {FORMAT})"
            self.connection.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES {values}; COMMIT;")
        (found,) = run("SELECT (SELECT value FROM meta WHERE name = 'format')").fetchone()
        if found != FORMAT:
            raise LedgerError(
                f"{self.path} has format {found}, this version of miles reads {FORMAT}: it can't go on from it"
            )

    @property
    def id(self) -> str:
        """The same for a ledger and its copies."""
        return str(self.connection.execute("SELECT value FROM meta WHERE name = 'id'").fetchone()[0])

    @property
    def changes(self) -> int:
        """Rows that were written since it was opened; -1 once closed."""
        return -1 if self._lock is None else self.connection.total_changes

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is done in the block is written together, or nothing of it. Raises LedgerError."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def write(self, told: Sequence[Sequence[Statement]]) -> None:
        """Writes transitions in one transaction. Raises LedgerError."""
        if told:
            with self.transaction() as connection:
                for statements in told:
                    for sql, values in statements:
                        connection.execute(sql, values)

    def copy_to(self, path: Path) -> None:
        """A copy as it is now, without the payloads of trained groups. Raises LedgerError."""
        run = self.connection.execute
        try:
            run("ATTACH ? AS copy", (str(path),))
            try:
                run("PRAGMA copy.journal_mode = DELETE")
                run("BEGIN")
                for name, sql in run("SELECT name, sql FROM main.sqlite_master WHERE sql IS NOT NULL").fetchall():
                    words = sql.split(" ", 2)
                    run(f"{words[0]} {words[1]} copy.{words[2]}")
                    if words[1] == "TABLE":
                        kept = " WHERE id IN (SELECT id FROM main.groups WHERE place = 'finished')"
                        run(f"INSERT INTO copy.{name} SELECT * FROM main.{name}{kept if name == 'payloads' else ''}")
                run("COMMIT")
            finally:
                if self.connection.in_transaction:
                    run("ROLLBACK")
                run("DETACH copy")
        except sqlite3.Error as error:
            raise self._explained(error, path) from error

    def close(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _explained(self, error: sqlite3.Error, path: Path | None = None) -> LedgerError:
        path = path or self.path
        if "full" in str(error) or "disk I/O" in str(error):
            return LedgerError(f"{path}: {error}; nothing was trained that isn't recorded: free some space and --load")
        return LedgerError(
            f"{path}: {error}; each checkpoint has a copy: --load one of its steps with another --run-name"
        )


def _goes_on_from(path: Path, copy: Path) -> bool:
    """``path`` is the ledger that ``copy`` was made of, and not behind it."""
    if not path.exists():
        return False
    (id_, *position), (copy_id, *copied) = _position(path), _position(copy)
    return id_ == copy_id and position >= copied


def _position(path: Path) -> tuple[Any, ...]:
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return (None,)
        row: tuple[Any, ...] = connection.execute(
            "SELECT (SELECT value FROM meta WHERE name = 'id'), (SELECT max(lineage) FROM lineages), "
            "(SELECT coalesce(max(id), -1) FROM groups)"
        ).fetchone()
        return row


def _replace(path: Path, copy: Path) -> None:
    for end in ("", "-wal", "-shm"):
        old = path.with_name(path.name + end)
        if old.exists():
            old.replace(path.with_name(path.stem + ".abandoned" + path.suffix + end))
    part = path.with_name(path.name + ".part")
    shutil.copyfile(copy, part)
    part.replace(path)


def _held(path: Path) -> int | None:
    """The lock of a run's ledger, until it is closed or the process ends. Raises LedgerError where another has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LedgerError(f"{path.parent}: another process holds the ledger of this run; wait for its end") from None
    return lock
