"""The benchmark of rewards runs, and its figures are of right verdicts only."""

import json

import pytest

from benchmarks import rewards

pytestmark = pytest.mark.slow


def test_quick_benchmark_prints_a_table_and_writes_the_same_figures(tmp_path, capsys):
    rewards.main(["--quick", "--json", str(tmp_path / "rates.json")])
    figures = json.loads((tmp_path / "rates.json").read_text())["rates"]
    assert [f["kind"] for f in figures] == ["mixed", *rewards.TEXT, *rewards.PARSED]
    out = capsys.readouterr().out
    for figure in figures:
        assert figure["kind"] in out
        assert all(figure[way] > 0 for way in ("in_place", "one_process", "two_processes"))


def test_wrong_verdicts_are_no_figure():
    with pytest.raises(AssertionError, match="4 wrong verdicts"):
        rewards.measure("flipped", lambda n: ("5", "5", 0.0), 4)
