"""Reward functions in every form that is in use, and a post-process function that also notes what is trained."""

import asyncio
from statistics import fmean

from journal import note


def share_of_digits(response, label):
    return sum(a == b for a, b in zip(response, label)) / len(label)  # noqa: B905


def plain(args, sample, **kwargs):
    return share_of_digits(sample.response, sample.label)


async def awaited(args, sample, **kwargs):
    await asyncio.sleep(0)
    return {"score": share_of_digits(sample.response, sample.label), "length": sample.response_length}


async def one_or_many(args, samples, **kwargs):
    """With --group-rm the same path gets the list of a group; elsewhere one sample."""
    if not isinstance(samples, list):
        return share_of_digits(samples.response, samples.label)
    note("together", groups=sorted({s.group_index for s in samples}), count=len(samples))
    return [share_of_digits(s.response, s.label) for s in samples]


def centred(args, samples):
    """(raw, trained): the group's mean is taken off."""
    raw = [s.get_reward_value(args) for s in samples]
    by_group = {}
    for sample, reward in zip(samples, raw, strict=True):
        by_group.setdefault(sample.group_index, []).append(reward)
    for sample, reward in zip(samples, raw, strict=True):
        note(
            "trained",
            group=sample.group_index,
            index=sample.index,
            tokens=sample.tokens,
            response=sample.response,
            response_length=sample.response_length,
            loss_mask=sample.loss_mask,
            spans=sample.version_spans,
            label=sample.label,
            metadata=sample.metadata,
            status=sample.status.value,
            reward=reward,
        )
    return raw, [r - fmean(by_group[s.group_index]) for s, r in zip(samples, raw, strict=True)]
