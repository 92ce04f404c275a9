"""Names of reasoning-gym tasks in, their generated problems as rows out: nothing is stored, a row is made when it is drawn.

A problem follows from (task, configuration, seed, index) alone. Its row names these, so that the scorer can make the
same problem again: ``metadata["reasoning_gym"]`` is {"task", "config", "index"}, all of it JSON, and
``metadata["rm_type"]`` is "reasoning_gym", so that each answer is scored by its own task.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from miles.data.rows import Row, Rows
from miles.errors import DataError

PREFIX = "reasoning_gym:"


class GymTask(Rows):
    """``config["size"]`` problems of one task. Raises DataError for a task or a setting that reasoning-gym refuses."""

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise DataError(
                f"{PREFIX}{task}: package reasoning-gym is not installed; pip install reasoning-gym works"
            ) from error
        self.task = task
        self._config = {"size": 500, "seed": 0} | dict(config)
        if not isinstance(self._config["size"], int) or self._config["size"] < 1:
            raise DataError(f"{PREFIX}{task}: size={self._config['size']} is no number of problems; size=500 works")
        if task not in DATASETS:
            near = ", ".join(difflib.get_close_matches(task, DATASETS))
            raise DataError(f"{PREFIX}{task}: there is no such task" + (f"; did you mean {near}?" if near else ""))
        try:
            self._problems = reasoning_gym.create_dataset(task, **self._config)
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"{PREFIX}{task}: {error}") from error

    def __len__(self) -> int:
        return int(self._config["size"])

    def row(self, i: int) -> Row:
        problem = self._problems[i]
        answer = problem["answer"]
        return Row(
            line=i + 1,
            prompt=problem["question"],
            label=answer if isinstance(answer, str) else None,
            metadata={
                "rm_type": "reasoning_gym",
                "reasoning_gym": {"task": self.task, "config": dict(self._config), "index": i},
            },
            path=f"{PREFIX}{self.task}",
        )
