"""`miles audit` passes what a run leaves, and finds whatever is changed in it: each law names the prompt."""

import json
from contextlib import closing
from sqlite3 import connect

import pytest

from miles.cli import audit as audit_command
from miles.driver.audit import audit
from miles.engine.fake import FakeEngine
from miles.observe.run_folder import RunFolder
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.ledger_store import FILE
from tests.virtual import run_in, settings_of

FLAGS = (
    "--fully-async --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8 --max-weight-staleness 1 "
    "--num-rollout 4 --input-key prompt "
)


@pytest.fixture
def home(tmp_path):
    """A run of four steps with its metrics."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(20)))
    flags = FLAGS + f"--prompt-data {rows}"
    home = tmp_path / "run"
    sim = run_in(home, flags, FakeEngine(), source=RolloutDataSourceWithBuffer(settings_of(flags).namespace()))
    folder = RunFolder(home)
    for batch in sim.trainer.batches:
        tokens = sum(s.effective_response_length for g in batch.groups for s in g.samples)
        folder.append_step(batch.step + 1, {"rollout/trained_tokens": float(tokens), "rollout/wasted_tokens": 0.0})
    folder.close()
    return home


def change(home, sql):
    with closing(connect(home / FILE)) as connection:
        connection.execute(sql)
        connection.commit()


def test_a_run_that_went_well_passes(home, capsys):
    result = audit(home)
    assert result.violations == []
    assert result.groups["trained"] == 8
    assert result.tokens["trained"] == 8 * 2 * 4
    assert audit_command(home) == 0
    assert "0 violation(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "law, prompt, sql",
    [
        ("once", 1, "UPDATE groups SET prompt = 1 WHERE prompt = 2"),
        ("once", 3, "DELETE FROM groups WHERE prompt = 3"),
        ("once", 3, "UPDATE groups SET place = 'given_up', length = 0 WHERE prompt = 3"),
        ("once", None, "UPDATE groups SET place = 'lost' WHERE prompt = 3"),
        ("lineages", None, "UPDATE publications SET version = 7 WHERE version = 2"),
        ("lineages", None, "DELETE FROM steps WHERE step = 1"),
        ("lineages", None, "UPDATE steps SET version = 1 WHERE step = 2"),
        ("future", 5, "UPDATE groups SET newest = 9 WHERE prompt = 5"),
        ("age", 5, "UPDATE groups SET oldest = 0 WHERE prompt = 5"),
        ("steps", None, "UPDATE groups SET place = 'finished' WHERE step = 1"),
        ("steps", None, "UPDATE steps SET groups = 3 WHERE step = 1"),
        ("tokens", None, "UPDATE groups SET trained = trained - 1, masked = 1 WHERE prompt = 5"),
        ("waste", 5, "UPDATE groups SET masked = 5 WHERE prompt = 5"),
        ("waste", 5, "UPDATE groups SET wasted = -1 WHERE prompt = 5"),
    ],
)
def test_every_law_finds_what_breaks_it(home, law, prompt, sql, capsys):
    change(home, sql)
    found = {(v.law, v.prompt) for v in audit(home).violations}
    assert (law, prompt) in found
    assert audit_command(home) == 1
    assert f"{law}: " + ("" if prompt is None else f"prompt {prompt} ") in capsys.readouterr().out


def test_metrics_that_count_more_waste_than_the_ledger_are_found(home):
    folder = RunFolder(home)
    folder.append_step(9, {"rollout/wasted_tokens": 1.0})
    folder.close()
    assert [v.law for v in audit(home).violations] == ["waste"]


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_ledger_that_cannot_be_read_is_one_line(tmp_path, what, capsys):
    if what == "damaged":
        (tmp_path / FILE).write_bytes(b"no database" * 999)
    assert audit_command(tmp_path) == 1
    assert str(tmp_path / FILE) in capsys.readouterr().err
