"""The embedded engine as a process of its own, for tests that need real HTTP: address in hand, ended at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = Path(__file__).parents[1] / "examples" / "quickstart" / "model"


@contextmanager
def serving(*flags: str, model: Path = MODEL) -> Iterator[str]:
    """The address of an engine that is ready."""
    command = [sys.executable, "-m", "miles.engine.local", "--model-path", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("miles-engine ready "), line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
