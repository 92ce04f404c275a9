"""A sample of `python -m miles.sim.kill_points`: killed at every await point, resumed from a few, and audited."""

import random

import pytest

from miles.rollout import lineage
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.ledger import Ledger
from miles.sim import kill_points
from miles.sim.kill_points import Tally, policies, try_all


@pytest.mark.parametrize("flags", policies())
def test_a_run_killed_anywhere_loses_nothing_and_repeats_nothing(flags):
    tally = Tally()
    try_all(flags, seed=random.Random(flags).randrange(1000), tally=tally, every=7)
    assert tally.violations == []
    assert tally.points > 500
    assert tally.resumes > 5
    assert tally.kept and tally.again and tally.given_up


def test_every_shipped_policy_is_tried():
    assert policies()[:2] == [
        "--staleness-policy evict",
        "--staleness-policy evict --async-unused-samples-handler retry",
    ]


def untrains_nothing(monkeypatch):
    """What was trained after the checkpoint isn't put back."""
    monkeypatch.setattr(lineage, "_UNTRAIN", "UPDATE groups SET step = step WHERE step >= ?")


def forgets_draws(monkeypatch):
    """The source draws again what the ledger has."""
    monkeypatch.setattr(RolloutDataSourceWithBuffer, "go_on_after", lambda self, drawn: None)


def forgets_what_waits(monkeypatch):
    """What is to be issued again never is."""
    restore = Ledger.restore
    monkeypatch.setattr(Ledger, "restore", lambda self, next_id, kept, waiting: restore(self, next_id, kept, []))


def keeps_what_is_newer(monkeypatch):
    """Groups are kept though the weights that sampled them are gone."""
    monkeypatch.setattr(lineage, "newest_kept", lambda start: 10**6)


@pytest.mark.parametrize("defect", [untrains_nothing, forgets_draws, forgets_what_waits, keeps_what_is_newer])
def test_a_defect_is_found(monkeypatch, defect):
    defect(monkeypatch)
    tally = Tally()
    try_all(policies()[0], seed=1, tally=tally, every=25)
    assert tally.violations


def test_the_command_prints_a_line_for_each_policy(monkeypatch, capsys):
    monkeypatch.setattr(
        kill_points, "try_all", lambda flags, seed, tally: setattr(tally, "points", tally.points + seed)
    )
    assert kill_points.main(["--seeds", "1:3"]) == 0
    out = capsys.readouterr().out
    assert f"total: {3 * len(policies())} kill points" in out
