"""What can go wrong, as a tree: every error that miles raises on purpose is one of these.

MilesError
├── SettingsError            the settings can't work; carries every problem, not the first one
│   └── UnknownReward        a sample wants a reward type that doesn't exist
├── DataError                a row of a data file can't be used; names file and line
├── HookError                a user's function failed; names the hook and the sample
├── EngineError              an inference request failed
│   ├── EngineRefused        4xx: the request itself is wrong; never repeated
│   ├── EngineFailed         5xx or an unusable reply: the engine took the request and failed
│   ├── EngineUnreachable    the connection broke or was refused
│   └── NoEngine             no engine in the routing for longer than a run waits
├── RewardFailed             the reward function failed; never a reward of 0
├── BufferClosed             nobody will put or take any more; carries the cause
├── WorkerDied               generation stopped; chained to the first cause
├── TooManyFailures          more groups in a row were given up than --rollout-failure-limit allows
├── LedgerError              the record of prompts can't be read or written
├── TrainerError             the optimizer step can't be taken
└── Stalled                  virtual time only: everybody waits and no timer is left
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class MilesError(Exception):
    """Base of everything miles raises on purpose; its text is written for the user."""


class SettingsError(MilesError):
    """Settings that can't work. ``problems`` holds one readable line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the settings:" if count == 1 else f"{count} problems in the settings:"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class UnknownReward(SettingsError, NotImplementedError):
    """A reward type that doesn't exist; hooks that call `async_rm` know it as NotImplementedError."""


class DataError(MilesError):
    """A row that can't be used; the text starts with ``file:line``."""


class HookError(MilesError):
    """A user's function raised or returned something unusable."""


class EngineError(MilesError):
    """An inference request failed."""


class EngineRefused(EngineError):
    """The engine refused the request (4xx): repeating it can't help."""


class EngineFailed(EngineError):
    """The engine took the request and failed (5xx), or its reply can't be used."""


class EngineUnreachable(EngineError):
    """The connection broke or was refused."""


class NoEngine(EngineError):
    """No engine was in the routing for as long as a run waits (``--engine-wait-s``)."""


class RewardFailed(MilesError):
    """A reward function failed on a sample. It is an infrastructure failure, never a reward of 0."""


class BufferClosed(MilesError):
    """The buffer is closed; chained to the cause where there is one."""


class WorkerDied(MilesError):
    """Generation stopped; chained to the first cause."""


class TooManyFailures(MilesError):
    """More groups in a row were given up than the run accepts."""


class LedgerError(MilesError):
    """The ledger of a run can't be read or written: full disk, damaged file, another process."""


class TrainerError(MilesError):
    """The optimizer step can't be taken."""


class Stalled(MilesError):
    """Virtual time only: everybody waits and no timer is left."""


def first_cause(error: BaseException) -> BaseException:
    """The first real failure inside (nested) exception groups, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def raising_first_cause() -> Iterator[None]:
    """Lets the first real failure of the task groups inside the block out, with the cause that it already has."""
    try:
        yield
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        raise cause from cause.__cause__
