"""What goes into rollout and generate functions and what comes out: the types that users' functions are written against."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from miles.types import Group, Sample


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    args: Namespace
    data_source: Any


@dataclass(frozen=True)
class RolloutFnTrainInput:
    """``weight_version``: the version at which the step that takes the groups will start."""

    rollout_id: int
    weight_version: int | None = None

    @property
    def evaluation(self) -> bool:
        return False


@dataclass(frozen=True)
class RolloutFnEvalInput:
    rollout_id: int
    generate_state: Any = None
    weight_version: str | None = None
    hf_dir: str | None = None

    @property
    def evaluation(self) -> bool:
        return True


@dataclass(frozen=True)
class RolloutFnTrainOutput:
    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class RolloutFnEvalOutput:
    """``data``: name of the dataset to its ``rewards``, ``truncated`` and ``samples``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class GenerateFnInput:
    """``state`` is the `GenerateState` of the run, ``sample`` the one to fill in."""

    state: Any
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Namespace:
        return self.state.args  # type: ignore[no-any-return]

    @property
    def max_context_len(self) -> int | None:
        """Most tokens of prompt plus response, where evaluation may have a bound of its own; None: the engine's."""
        own: int | None = self.args.eval_max_context_len if self.evaluation else None
        return own or self.args.rollout_max_context_len


@dataclass(frozen=True)
class GenerateFnOutput:
    """One sample, or several compact siblings in its place."""

    samples: Sample | list[Sample]
