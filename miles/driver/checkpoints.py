"""Checkpoint folders: written under another name, visible at once when complete, found again by `--load`.

checkpoints/step_000010/    what the trainer and the rollout side wrote, and ``checkpoint.json``
checkpoints/latest          the name of the newest complete one
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles.errors import SettingsError

PART = ".part"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``step`` is the next one to train, ``version`` the weights that it holds.

    ``about`` is what the run that wrote it was told (`miles.driver.resume.about`).
    """

    step: int
    version: int
    folder: str
    about: dict[str, Any] = field(default_factory=dict)


class CheckpointFolder:
    """Writes checkpoints below one folder, and removes older ones as told.

    ``keep_last`` complete ones stay (None: all), and those of every ``keep_every`` steps. A file ``sentinel`` asks for one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        about: dict[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        sentinel: Path | None = None,
    ) -> None:
        self._folder = folder
        self._about = about or {}
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._sentinel = sentinel

    def asked_for(self) -> bool:
        """Somebody made the sentinel file; it is gone then, so that it asks once."""
        if self._sentinel is None or not self._sentinel.exists():
            return False
        self._sentinel.unlink()
        return True

    def begin(self, step: int) -> str:
        """An empty folder to write the checkpoint after training step ``step`` into."""
        part = self._folder / (_name(step) + PART)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return str(part)

    def finish(self, step: int, version: int) -> None:
        """Everything is written: the checkpoint becomes visible, then ``latest`` names it, then older ones go."""
        part, final = self._folder / (_name(step) + PART), self._folder / _name(step)
        checkpoint = Checkpoint(step + 1, version, str(final), self._about)
        (part / "checkpoint.json").write_text(json.dumps(asdict(checkpoint)))
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        latest = self._folder / ("latest" + PART)
        latest.write_text(final.name)
        latest.replace(self._folder / "latest")
        self._remove_older(step)

    def _remove_older(self, step: int) -> None:
        if self._keep_last is None:
            return
        written = sorted(f for f in self._folder.glob("step_*[0-9]") if f.name <= _name(step))
        for folder in written[: -self._keep_last]:
            if not self._keep_every or int(folder.name.removeprefix("step_")) % self._keep_every:
                shutil.rmtree(folder, ignore_errors=True)


def find_checkpoint(load: str | None) -> Checkpoint | None:
    """The checkpoint that ``--load`` means: a run folder, a checkpoints folder or one step; None where there is none yet."""
    if load is None:
        return None
    given = Path(load)
    for folder in (given, given / "checkpoints"):
        latest = folder / "latest"
        named = [folder / latest.read_text().strip()] if latest.exists() else []
        for step in [folder, *named, *sorted(folder.glob("step_*[0-9]"), reverse=True)]:
            description = step / "checkpoint.json"
            if description.exists():
                return Checkpoint(**(read_json(description) | {"folder": str(step)}))
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises SettingsError where it is damaged."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise SettingsError([f"--load: {path} is damaged ({error}); an earlier step beside it works"]) from error
    return values


def _name(step: int) -> str:
    return f"step_{step + 1:06d}"
