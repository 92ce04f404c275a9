"""A server's command line, its environment and how it tells that it is ready: what is started, whichever server it is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles.config.owners import EngineSettings

OF_ANOTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Launch:
    """One way to start one engine process.

    ``argv``: the program and its arguments. ``env``: variables on top of the parent's. ``ready_line``: the text that its
    first line on stdout holds once it serves; None: it serves as soon as ``/health`` answers 200.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_line: str | None = None

    def environ(self, parent: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process.

        The programs beside its interpreter come first on PATH (servers compile kernels with its ``ninja``); another
        interpreter than this one sees none of this one's packages.
        """
        python = self.argv[0]
        kept = {n: v for n, v in parent.items() if python == sys.executable or n not in OF_ANOTHER_PYTHON}
        path = os.pathsep.join([os.path.dirname(python), parent.get("PATH", os.defpath)])
        return kept | {"PATH": path} | dict(self.env)


def interpreter(engine: EngineSettings) -> str:
    """The Python that runs the engines: ``--engine-python`` as an absolute path, or this one."""
    python = engine.engine_python
    return sys.executable if python is None else os.path.abspath(shutil.which(python) or python)


def model_context(model: str | None) -> int | None:
    """The longest sequence that the model's config allows; None where it doesn't say."""
    config = Path(model or "", "config.json")
    if not model or not config.is_file():
        return None
    length = json.loads(config.read_text()).get("max_position_embeddings")
    return int(length) if length else None
