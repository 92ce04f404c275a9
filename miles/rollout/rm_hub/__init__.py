"""Samples in, rewards out: shipped reward types in processes with a hard limit, and the user's own function."""

from miles.rollout.rm_hub.rewards import Rewards, async_rm, batched_async_rm, use_scorer

__all__ = ["Rewards", "async_rm", "batched_async_rm", "use_scorer"]
