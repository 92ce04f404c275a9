"""The ledger's file: ordered, atomic, held by one process, and loud where it can't be."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from miles.errors import LedgerError
from miles.rollout.ledger import Ledger
from miles.rollout.ledger_store import FILE, PAGE_BYTES, LedgerFile, PlaceStore, ThreadStore
from miles.rollout.lineage import StartingPoint, go_back
from miles.rollout.staleness import finished_group
from miles.types import Batch, Sample, VersionSpan


def prompts(number, count=2):
    return [Sample(group_index=number, index=number * count + i, prompt="p") for i in range(count)]


def finish(ledger, group, version=1, tokens=3):
    for sample in group.prompts:
        sample.submit_version = version
        sample.append_response([1] * tokens, [-0.5] * tokens, [VersionSpan(version, 0, tokens)])
        sample.reward = 1.0
    ledger.finish(group, group.prompts)
    return finished_group(group.issue_id, group.prompts)


def train(ledger, step, groups, version=1):
    ledger.take(g.issue_id for g in groups)
    ledger.commit(Batch(step, version, tuple(groups)))


def opened(folder):
    file = LedgerFile(folder / FILE)
    back = go_back(file, StartingPoint(), bound=None)
    return file, back


def rows(folder, select="SELECT id, place, step, wasted FROM groups"):
    with closing(sqlite3.connect(folder / FILE)) as connection:
        return connection.execute(select).fetchall()


def on_a_thread(folder, work):
    """Runs ``work(ledger, store)`` with a store of its own, on a loop."""

    async def run():
        file, _ = opened(folder)
        store = ThreadStore(file)
        try:
            await work(Ledger(window=8, store=store), store)
        finally:
            store.close()

    asyncio.run(run())


def test_transitions_are_on_disk_once_settled(tmp_path):
    async def work(ledger, store):
        groups = [ledger.issue(prompts(i)) for i in range(4)]
        batch = [finish(ledger, g) for g in groups[:2]]
        train(ledger, 0, batch)
        ledger.give_up(groups[2].issue_id, "engine")
        await store.settle()
        assert rows(tmp_path) == [
            (0, "trained", 0, 0),
            (1, "trained", 0, 0),
            (2, "given_up", None, 0),
            (3, "issued", None, 0),
        ]

    on_a_thread(tmp_path, work)


def test_what_is_told_before_closing_is_written(tmp_path):
    async def work(ledger, store):
        for i in range(300):
            ledger.issue(prompts(i))

    on_a_thread(tmp_path, work)
    assert len(rows(tmp_path)) == 300


def test_a_step_is_committed_whole_or_not_at_all(tmp_path):
    """Its second group breaks a rule of the file, so that nothing of the step is there."""
    file, _ = opened(tmp_path)
    ledger = Ledger(window=8, store=PlaceStore(file))
    batch = [finish(ledger, ledger.issue(prompts(i))) for i in range(2)]
    file.connection.execute(
        "CREATE TRIGGER no BEFORE UPDATE ON groups WHEN new.id = 1 BEGIN SELECT raise(ABORT, 'no'); END"
    )
    with pytest.raises(LedgerError, match="no"):
        train(ledger, 0, batch)
    assert [place for _, place, *_ in rows(tmp_path)] == ["finished", "finished"]
    assert rows(tmp_path, "SELECT * FROM steps") == []
    file.close()


def test_payloads_stay_until_a_checkpoint_covers_their_step(tmp_path):
    file, _ = opened(tmp_path)
    ledger = Ledger(window=8, store=PlaceStore(file))
    for step in range(3):
        train(ledger, step, [finish(ledger, ledger.issue(prompts(step)))])
    finish(ledger, ledger.issue(prompts(3)))
    ledger.covered(2)
    assert rows(tmp_path, "SELECT id FROM payloads") == [(2,), (3,)]
    asyncio.run(ledger.store.after(lambda file: file.copy_to(tmp_path / "copy.sqlite")))
    file.close()
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as copy:
        assert copy.execute("SELECT id FROM payloads").fetchall() == [(3,)]
        assert copy.execute("SELECT count(*) FROM groups").fetchone() == (4,)


def test_one_process_holds_a_ledger(tmp_path):
    file, _ = opened(tmp_path)
    with pytest.raises(LedgerError, match="another process holds the ledger"):
        LedgerFile(tmp_path / FILE)
    file.close()
    LedgerFile(tmp_path / FILE).close()


def test_another_format_is_refused(tmp_path):
    file, _ = opened(tmp_path)
    file.connection.execute("UPDATE meta SET value = 0 WHERE name = 'format'")
    file.close()
    with pytest.raises(LedgerError, match="has format 0, this version of miles reads 1"):
        opened(tmp_path)


@pytest.mark.parametrize("damage", ["header", "middle"])
def test_a_damaged_file_is_told_at_once(tmp_path, damage):
    file, _ = opened(tmp_path)
    ledger = Ledger(window=8, store=PlaceStore(file))
    for i in range(400):
        ledger.issue(prompts(i))
    ledger.store.close()
    content = bytearray((tmp_path / FILE).read_bytes())
    start = 0 if damage == "header" else PAGE_BYTES
    content[start : start + 2000] = b"\xff" * 2000
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(LedgerError, match=r"ledger.sqlite: .*each checkpoint has a copy"):
        opened(tmp_path)


def test_a_full_disk_stops_whoever_waits_and_the_run(tmp_path):
    async def run():
        file, _ = opened(tmp_path)
        pages = file.connection.execute("PRAGMA page_count").fetchone()[0]
        file.connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        store = ThreadStore(file)
        running = asyncio.create_task(store.run())
        ledger = Ledger(window=8, store=store)
        for i in range(2000):
            ledger.issue(prompts(i))
        with pytest.raises(LedgerError, match=r"full.*free some space"):
            await store.settle()
        with pytest.raises(LedgerError, match="full"):
            await running
        with pytest.raises(LedgerError, match="full"):
            await store.settle()
        store.close()

    asyncio.run(run())


def test_a_copy_replaces_only_a_ledger_that_does_not_go_on_from_it(tmp_path):
    """A node was lost, or a run starts in a folder of its own: the checkpoint's copy is what there is."""
    file, _ = opened(tmp_path / "a")
    ledger = Ledger(window=8, store=PlaceStore(file))
    ledger.issue(prompts(0))
    copy = tmp_path / "copy.sqlite"
    file.copy_to(copy)
    ledger.issue(prompts(1))
    file.close()
    for folder, expected in (("a", 2), ("b", 1)):
        LedgerFile(tmp_path / folder / FILE, copy=copy).close()
        assert len(rows(tmp_path / folder)) == expected
    other, _ = opened(tmp_path / "c")
    other.close()
    LedgerFile(tmp_path / "c" / FILE, copy=copy).close()
    assert len(rows(tmp_path / "c")) == 1
    assert (tmp_path / "c" / "ledger.abandoned.sqlite").exists()
