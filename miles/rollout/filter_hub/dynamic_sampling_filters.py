"""A scored group in, keep or reject out: the stock filters for ``--dynamic-sampling-filter-path``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.types import Group, Sample, iter_samples


def check_reward_nonzero_std(args: Namespace, group: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Rejects a group whose scored samples all have one reward: every advantage would be 0 (DAPO, arXiv:2503.14476).

    Samples without a reward say nothing; with fewer than two scored ones there is nothing to compare.
    """
    rewards = [r for s in iter_samples(group) if (r := s.get_reward_value(args)) is not None]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="unscored")
    if min(rewards) == max(rewards):
        return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:g}")
    return DynamicFilterOutput(keep=True)


def check_no_aborted(args: Namespace, group: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Rejects a group with an aborted sample."""
    aborted = any(s.status is Sample.Status.ABORTED for s in iter_samples(group))
    return DynamicFilterOutput(keep=not aborted, reason="aborted" if aborted else None)
