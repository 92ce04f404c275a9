"""What comes back of a finished group is what went in, in little more space than its arrays."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from miles.rollout.payload import Payload, decode, encode
from miles.types import RewardSpec, Sample, Status, VersionSpan


def sampled(index=0, tokens=5, **more):
    rng = random.Random(index)
    sample = Sample(group_index=3, index=index, prompt=[{"role": "user", "content": "é"}], tokens=[7, 150_000], **more)
    ids = [rng.randrange(70_000) for _ in range(tokens)]
    sample.append_response(ids, [float(np.float32(-rng.random())) for _ in ids], [VersionSpan(4, 0, tokens)])
    sample.append_response([9], [0.0], [], trainable=False)
    sample.response = " ".join(map(str, ids))
    sample.status, sample.reward, sample.submit_version = Status.COMPLETED, {"score": 0.5}, 4
    return sample


def values(group):
    return [[s.to_dict() for s in item] if isinstance(item, list) else item.to_dict() for item in group]


@pytest.mark.parametrize(
    "group",
    [
        [sampled(0), sampled(1, tokens=0)],
        [[sampled(0), sampled(1)], sampled(2)],
        [Sample(index=1, tokens=[1]), Sample(index=2, loss_mask=[], rollout_log_probs=[])],
        [sampled(0, metadata={"tools": [1, None, "x"]}, reward_spec=RewardSpec("math"), routing_key="g")],
    ],
    ids=["samples", "compact siblings", "bare", "metadata"],
)
def test_a_group_comes_back_as_it_was(group):
    assert values(decode(encode(group))) == values(group)


def test_log_probs_come_back_as_training_reads_them():
    sample = Sample(tokens=[1], response_length=1, rollout_log_probs=[-0.1])
    assert decode(encode([sample]))[0].rollout_log_probs == [float(np.float32(-0.1))]


@dataclass
class Judge:
    name: str


@pytest.mark.parametrize("thing", [Judge("x"), object(), (1, 2), float("nan"), {1: 2}, np.ones(2)])
def test_what_would_come_back_as_something_else_is_not_kept(thing):
    assert encode([sampled(metadata={"of_a_hook": thing})]) is None


def test_a_payload_is_of_the_moment_when_the_group_finished():
    """Its prompt may be reset for a retry before the writer's thread comes to it."""
    sample = sampled()
    payload = Payload([sample])
    sample.reset_for_retry()
    assert decode(payload.__conform__(None))[0].response_length == 6


def test_eight_samples_of_512_tokens_take_at_most_a_tenth_more_than_their_arrays():
    from benchmarks.ledger import measure_ratio

    assert measure_ratio() <= 1.1
