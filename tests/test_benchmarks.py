"""Every benchmark runs in its quick form and prints what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def quick(module, *flags):
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_control_plane_keeps_its_rate_and_its_memory(tmp_path):
    quick("control_plane", "--json", str(tmp_path / "figures.json"))
    assert json.loads((tmp_path / "figures.json").read_text()).keys() == {"events_per_s", "rss_growth_mb"}


@pytest.mark.slow
def test_starts_on_large_prompt_files_are_measured():
    result = json.loads(quick("data", "--json"))
    for form in ("jsonl", "parquet"):
        assert result[form]["start_s"] > 0 and 0 < result[form]["rss_mb"] < result["limits"]["rss_mb"]
    assert "parquet" in quick("data")
