"""Finished groups go in, metrics under the contract's names come out; an average counts each rollout once.

A rollout is one execution of a prompt. It may leave several rows (compact siblings: turns or branches of one agent run),
which share a rollout id. Its reward is the mean of its rows', its length their sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import comb
from statistics import fmean, median

from miles.types import Group, Sample, Status, iter_samples

Rollout = list[Sample]
"""The rows that one execution of a prompt left."""

PASS_REWARD = 1.0
"""A response with at least this reward passes (the score of a correct answer in every built-in reward)."""

LOOP_PERIOD, LOOP_REPEATS, LOOP_TOKENS = 64, 4, 32
"""A response loops that ends in one piece of at most 64 tokens, said 4 times or more, over 32 tokens or more."""


def rollout_metrics(
    groups: Sequence[Group], *, version: int, reward_key: str | None, max_response_len: int | None
) -> dict[str, float]:
    """What a batch of groups looked like when its training step started at weight ``version``.

    ``max_response_len`` (tokens) tells truncation only where a hook left no status. Raises RewardFailed for a reward
    object that ``reward_key`` doesn't fit.
    """
    rollouts = [rollout for group in groups for rollout in rollouts_of(group)]
    if not rollouts:
        return {}
    rewards = [_scored(group, reward_key) for group in groups]
    known = [reward for group in rewards for reward in group]
    return {
        **({"rollout/raw_reward": fmean(known)} if known else {}),
        "rollout/none_reward_ratio": (len(rollouts) - len(known)) / len(rollouts),
        "rollout/truncated_ratio": _share(is_truncated(rollout, max_response_len) for rollout in rollouts),
        **_zero_std(rewards),
        **_shape("rollout", rollouts),
        **_engine_counters(rollouts),
        **_staleness(groups, version),
    }


def eval_metrics(
    name: str, groups: Sequence[Group], *, reward_key: str | None, max_response_len: int | None = None
) -> dict[str, float]:
    """Accuracy of one evaluation set, with pass@k for k = 1, 2, 4, ... up to the samples that every prompt has.

    What has no reward isn't a wrong answer: it is left out, and ``eval/{name}-none_reward_ratio`` says how much. Raises
    RewardFailed for a reward object that ``reward_key`` doesn't fit.
    """
    rollouts = [rollout for group in groups for rollout in rollouts_of(group)]
    if not rollouts:
        return {}
    rewards = [scored for group in groups if (scored := _scored(group, reward_key))]
    known = [reward for group in rewards for reward in group]
    problems = [(len(group), sum(reward >= PASS_REWARD for reward in group)) for group in rewards]
    least = min((n for n, _ in problems), default=0)
    head = f"eval/{name}"
    return {
        **({head: fmean(known)} if known else {}),
        f"{head}-none_reward_ratio": (len(rollouts) - len(known)) / len(rollouts),
        f"{head}-truncated_ratio": _share(is_truncated(rollout, max_response_len) for rollout in rollouts),
        **{f"{head}-pass@{k}": mean_pass_at_k(problems, k) for k in _powers_of_two(least)},
        **(_shape(head, rollouts) if any(row.tokens for rollout in rollouts for row in rollout) else {}),
    }


def passrate_metrics(groups: Sequence[Group], *, reward_key: str | None) -> dict[str, float]:
    """pass@k of a training batch, for k = 1, 2, 4, ... up to the scored rollouts that every scored group has."""
    rewards = [scored for group in groups if (scored := _scored(group, reward_key))]
    problems = [(len(group), sum(reward >= PASS_REWARD for reward in group)) for group in rewards]
    least = min((n for n, _ in problems), default=0)
    return {f"passrate/pass@{k}": mean_pass_at_k(problems, k) for k in _powers_of_two(least)}


def category_metrics(groups: Sequence[Group], key: str) -> dict[str, float]:
    """Share of the rollouts in each category: what the reward object of a rollout's last row holds under ``key``.

    A rollout without a reward object, or whose object lacks the key, is in none.
    """
    last = [rollout[-1].reward for group in groups for rollout in rollouts_of(group)]
    found = Counter(str(reward[key]) for reward in last if isinstance(reward, dict) and reward.get(key) is not None)
    return {f"rollout/error_cat/{name}": count / len(last) for name, count in sorted(found.items())}


def eval_sets(metrics: Iterable[str]) -> list[str]:
    """Names of the evaluation sets among metric names: each one's accuracy is ``eval/{name}``."""
    names = {name for name in metrics if name.startswith("eval/")}
    return sorted(name.removeprefix("eval/") for name in names if f"{name}-truncated_ratio" in names)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of the n samples of one problem, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} needs at least {max(k, 1)} samples of each problem, there are {n}; k from 1 to {n} works"
        )
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct samples of {n}")
    return 1 - comb(n - c, k) / comb(n, k)


def mean_pass_at_k(problems: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of `pass_at_k` over problems, each (samples, correct ones); never over their sums."""
    return fmean(pass_at_k(n, c, k) for n, c in problems)


# ---- one rollout


def rollouts_of(group: Group) -> list[Rollout]:
    """The rollouts of a group: rows with one rollout id are one; without an id, so is each item of the group."""
    rollouts: dict[int | tuple[str, int], Rollout] = {}
    for position, item in enumerate(group):
        for row in item if isinstance(item, list) else [item]:
            key = ("item", position) if row.rollout_id is None else row.rollout_id
            rollouts.setdefault(key, []).append(row)
    return list(rollouts.values())


def rollout_reward(rollout: Rollout, reward_key: str | None) -> float | None:
    """Mean reward of a rollout's rows, None where no row has one. Raises RewardFailed where ``reward_key`` doesn't fit."""
    known = [reward for row in rollout if (reward := row.reward_value(reward_key)) is not None]
    return fmean(known) if known else None


def _scored(group: Group, reward_key: str | None) -> list[float]:
    rewards = [rollout_reward(rollout, reward_key) for rollout in rollouts_of(group)]
    return [reward for reward in rewards if reward is not None]


def is_truncated(rollout: Rollout, max_response_len: int | None) -> bool:
    """A row was cut off: its status says so, or it has none and is as long as a response may be."""
    return any(
        row.status is Status.TRUNCATED
        or (row.status is Status.PENDING and max_response_len is not None and row.response_length >= max_response_len)
        for row in rollout
    )


def is_looping(row: Sample) -> bool:
    """The response ends in one piece said over and over (see ``LOOP_PERIOD``)."""
    response = row.tokens[max(row.prompt_length, len(row.tokens) - LOOP_PERIOD * LOOP_REPEATS) :]
    for period in range(1, LOOP_PERIOD + 1):
        length = max(LOOP_TOKENS, LOOP_REPEATS * period)
        if length > len(response):
            return False
        if response[-length + period :] == response[-length:-period]:
            return True
    return False


# ---- families of metrics


def _shape(head: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths, loops and versions, of training and evaluation alike."""
    versions = [{int(v) for row in rollout for v in row.weight_versions if v.isdigit()} for rollout in rollouts]
    oldest = [v for rollout in rollouts if (v := _oldest([row.oldest_version for row in rollout])) is not None]
    return {
        **_spread(f"{head}/response_len", [sum(row.response_length for row in rollout) for rollout in rollouts]),
        f"{head}/repetition_frac": _share(any(map(is_looping, rollout)) for rollout in rollouts),
        **_spread(f"{head}/weight_version", oldest),
        f"{head}/weight_version/mixed_version_ratio": _share(len(found) > 1 for found in versions),
    }


def _oldest(versions: Collection[int | None]) -> int | None:
    """The least of them, None where one isn't known: what may be of any age has no oldest version."""
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def _zero_std(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Groups whose rollouts all have one reward teach nothing; a lone scored rollout has nothing to differ from.

    Percentages, from 0 to 100, are of the groups with at least two scored rollouts.
    """
    comparable = [group for group in rewards if len(group) > 1]
    if not comparable:
        return {}
    flat = Counter(group[0] for group in comparable if len(set(group)) == 1)
    return {
        **{f"rollout/zero_std/count_{reward:g}": float(count) for reward, count in sorted(flat.items())},
        "rollout/zero_std/all_zero_percentage": 100 * flat[0.0] / len(comparable),
        "rollout/zero_std/all_one_percentage": 100 * flat[1.0] / len(comparable),
    }


def _staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Age of a token: ``version`` minus the one that sampled it. Age of a group: that of its oldest trainable token."""
    by_group = [sum((row.trainable_tokens() for row in iter_samples(group)), Counter[int | None]()) for group in groups]
    tokens = sum(by_group, Counter[int | None]())
    total = tokens.total()
    ages = [version - oldest for group in by_group if (oldest := _oldest(group)) is not None]
    shares = {version - v: count / total for v, count in tokens.items() if v is not None}
    head = "rollout/fully_async"
    return {
        **({f"{head}/avg_staleness": fmean(ages), f"{head}/max_staleness": float(max(ages))} if ages else {}),
        **{f"{head}/age/{age}": share for age, share in sorted(shares.items())},
        **({f"{head}/age/unknown": tokens[None] / total} if tokens[None] else {}),
        "rollout/trained_tokens": float(total),
    }


def _engine_counters(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Prefix-cache and speculative-decoding rates over all requests, where engines report them."""
    rows = [row for rollout in rollouts for row in rollout]
    prompts = sum(row.prefix_cache_info.total_prompt_tokens for row in rows)
    cached = sum(row.prefix_cache_info.cached_tokens for row in rows)
    drafted = sum(row.spec_info.spec_draft_token_num for row in rows)
    verified = sum(row.spec_info.spec_verify_ct for row in rows)
    metrics: dict[str, float] = {}
    if prompts:
        metrics["rollout/prefix_cache_hit_rate"] = cached / prompts
        metrics["rollout/avg_cached_tokens_per_sample"] = cached / len(rollouts)
    if drafted:
        metrics["rollout/spec_accept_rate"] = sum(row.spec_info.spec_accept_token_num for row in rows) / drafted
    if verified:
        metrics["rollout/spec_accept_length"] = sum(row.spec_info.completion_token_num for row in rows) / verified
    return metrics


def _spread(head: str, values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{head}/mean": fmean(values),
        f"{head}/median": float(median(values)),
        f"{head}/max": float(max(values)),
        f"{head}/min": float(min(values)),
    }


def _share(flags: Iterable[bool]) -> float:
    return fmean(map(float, flags))


def _powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length())]
