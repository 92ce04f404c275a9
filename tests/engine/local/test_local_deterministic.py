"""Deterministic mode: bits of ids and log-probs are a function of weights, prompt, parameters and seed."""

import random

import pytest

from tests.engine.local.tiny import VOCAB, make_engine, random_prompt, request, worst_difference

LOADS = [
    {"rows": 16},
    {"rows": 1},
    {"rows": 40, "prefill_tokens": 4096},
    {"rows": 3, "prefill_tokens": 10},
    {"rows": 16, "tokens": 512},
]


def requests(count):
    rng = random.Random(7)
    shared = random_prompt(rng, 60)
    made = []
    for i in range(count):
        prompt = shared + random_prompt(rng, i % 5) if i % 3 == 0 else random_prompt(rng, rng.randrange(1, 110))
        limits = rng.choice(({}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7}, {"presence_penalty": 0.5}))
        made.append((prompt, rng.randrange(1, 40), i, limits))
    return made


def replay(folder, asked, order, load):
    """Joins at random times, is retracted at random times; what each request sampled."""
    rng = random.Random(order)
    engine = make_engine(folder, deterministic=True, **load)
    coming = list(asked)
    rng.shuffle(coming)
    ended = []
    while coming or engine.may_step:
        for _ in range(min(len(coming), rng.choice((0, 1, 5)))):
            prompt, new, seed, limits = coming.pop()
            engine.submit(request(prompt, new, seed=seed, **limits))
        engine.step()
        if rng.random() < 0.02:
            engine.pause("retract")
            engine.resume()
        ended += engine.take_ended()
    return {s.rid: (s.output_ids, s.log_probs) for s in ended}, ended


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_arrival_orders_loads_and_retracts_change_no_bit(folders, references, family, count):
    asked = requests(count)
    first, ended = replay(folders[family], asked, 0, LOADS[0])
    assert len(first) == count
    assert max(max(ids) for ids, _ in first.values()) < VOCAB
    assert worst_difference(references[family], ended) < 1e-4
    for order in range(1, 10):
        again, _ = replay(folders[family], asked, order, LOADS[order % len(LOADS)])
        assert [rid for rid in first if again[rid] != first[rid]] == []
