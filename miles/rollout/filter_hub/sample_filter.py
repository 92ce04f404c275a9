"""A batch's groups in, the same groups out, some samples marked ``remove_sample``: the user's sample filter."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from miles.errors import MilesError
from miles.hooks import hook_failed, load_function
from miles.types import FinishedGroup

SampleFilter = Callable[[Sequence[FinishedGroup]], None]


def make_sample_filter(path: str | None, args: Namespace) -> SampleFilter | None:
    """``--rollout-sample-filter-path`` f(args, groups) -> None, called in place on the batch that a step takes.

    What it marks keeps its part in the loss's normalisation, with a mask of zeros. Its failures are HookErrors.
    """
    function = load_function(path)
    if function is None:
        return None

    def apply(groups: Sequence[FinishedGroup]) -> None:
        try:
            function(args, [group.samples for group in groups])
        except MilesError:
            raise
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            raise hook_failed(str(path), function, error, f"a batch of {len(groups)} groups") from error

    return apply
