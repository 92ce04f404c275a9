"""What the engine samples and what it says of it, against a full forward by transformers in float32."""

import random

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from miles.engine.local.model import inverse_frequencies
from miles.engine.local.model_config import ModelConfig
from tests.engine.local.tiny import (
    CONFIGS,
    Reference,
    drain,
    make_engine,
    random_prompt,
    request,
    save_model,
    steps,
    worst_difference,
)

LENGTHS = (1, 2, 7, 7, 63, 64, 65, 100, 100, 130)
"""Short ones attend together with padding, equal long ones without, others alone."""


def test_log_probs_through_one_joining_step_are_those_of_transformers(folders, references, family):
    rng = random.Random(0)
    engine = make_engine(folders[family], prefill_tokens=4096)
    for i, length in enumerate(LENGTHS):
        engine.submit(request(random_prompt(rng, length), 30, seed=i))
    ended = drain(engine)
    assert len(ended) == len(LENGTHS)
    assert worst_difference(references[family], ended) < 1e-4


def test_log_probs_are_exact_while_requests_join_and_leave(folders, references, family):
    rng = random.Random(1)
    engine = make_engine(folders[family], rows=4, prefill_tokens=80)
    for i in range(14):
        new = rng.randrange(1, 40)
        engine.submit(
            request(random_prompt(rng, rng.randrange(1, 90)), new, seed=i, temperature=rng.choice((0.7, 1.3)))
        )
    ended = drain(engine)
    assert len(ended) == 14
    assert worst_difference(references[family], ended) < 1e-4


def test_log_probs_are_exact_after_retract(folders, references, family):
    rng = random.Random(2)
    engine = make_engine(folders[family])
    for i in range(5):
        engine.submit(request(random_prompt(rng, 20 + i), 25, seed=i))
    for _ in range(3):
        steps(engine, 6)
        engine.pause("retract")
        assert (engine.running, engine.waiting) == (0, 5)
        engine.resume()
    assert worst_difference(references[family], drain(engine)) < 1e-4


def test_retract_changes_nothing_that_is_sampled(folder):
    def sampled(retracts):
        engine = make_engine(folder)
        for i in range(4):
            engine.submit(request([3, 4, 5 + i], 20, seed=i))
        steps(engine, 7)
        if retracts:
            engine.pause("retract")
            engine.resume()
        return {s.rid: s.output_ids for s in drain(engine)}

    assert sampled(True) == sampled(False)


def test_temperature_zero_is_transformers_greedy_with_untempered_log_probs(folders, references, family):
    engine = make_engine(folders[family])
    prompts = [[5, 9, 2], [30, 31, 32, 33, 34, 35, 36, 8], [17]]
    sequences = [request(prompt, 24, temperature=0) for prompt in prompts]
    for sequence in sequences:
        engine.submit(sequence)
    drain(engine)
    for sequence in sequences:
        assert sequence.output_ids == references[family].greedy(sequence.prompt_ids, 24)
    assert worst_difference(references[family], sequences) < 1e-4


def test_log_probs_are_of_the_tempered_distribution_before_truncation(folder, reference):
    engine = make_engine(folder)
    for i, limits in enumerate(({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"min_new_tokens": 9})):
        engine.submit(request([4, 5, 6], 12, seed=i, temperature=0.8, stop_token_ids=(12,), **limits))
    assert worst_difference(reference, drain(engine)) < 1e-4


def test_a_seed_draws_the_same_whatever_else_runs(folder):
    rng = random.Random(3)
    watched = random_prompt(rng, 9)

    def sampled(others):
        engine = make_engine(folder, rows=4)
        for i in range(others):
            engine.submit(request(random_prompt(rng, rng.randrange(1, 70)), rng.randrange(1, 9), seed=100 + i))
        steps(engine, min(others, 2))
        sequence = request(watched, 30, seed=7)
        engine.submit(sequence)
        drain(engine)
        return sequence.output_ids

    alone = sampled(0)
    assert sampled(3) == alone
    assert sampled(9) == alone


def test_other_seeds_draw_other_responses(folder):
    engine = make_engine(folder)
    for seed in range(8):
        engine.submit(request([1, 2, 3], 12, seed=seed))
    assert len({tuple(s.output_ids) for s in drain(engine)}) == 8


def test_bfloat16_checkpoint_runs_in_float32_as_transformers_reads_it(tmp_path, family):
    folder = save_model(tmp_path, family, seed=4, dtype=torch.bfloat16)
    engine = make_engine(folder)
    engine.submit(request([3, 1, 4, 1, 5], 20))
    assert worst_difference(Reference(folder), drain(engine)) < 1e-4


@pytest.mark.parametrize("family", CONFIGS)
def test_rope_frequencies_are_those_of_transformers(folders, family):
    config = ModelConfig.read(folders[family])
    ours = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    theirs = LlamaRotaryEmbedding(CONFIGS[family]).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
