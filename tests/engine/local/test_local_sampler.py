"""The sampler against a float64 numpy reference: exact shares, because the uniform numbers are a grid."""

import numpy as np
import pytest
import torch

from miles.engine.local.sampler import BLOCK, HEAD, SamplingBatch, sample, uniforms
from tests.engine.local.tiny import request

GRID = 4000


def logits_of(size, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=size) * scale


def tempered(logits, temperature):
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


def truncated(p, top_k=-1, top_p=1.0, min_p=0.0):
    """Each limit on its own, on the same distribution; what passes all of them, renormalised."""
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    mass = 0.0
    for rank, i in enumerate(order):
        keep[i] = (top_k == -1 or rank < top_k) and (top_p == 1 or mass < top_p) and p[i] >= min_p * p.max()
        mass += p[i]
    kept = np.where(keep, p, 0)
    return kept / kept.sum()


def shares(logits, **params):
    """How often each token is drawn while the uniform number goes through (0, 1] in GRID steps; and the log-probs."""
    batch = SamplingBatch.of([request([0], 1, **params)] * GRID)
    uniform = (torch.arange(GRID) + 0.5) / GRID
    drawn = sample(torch.tensor(logits, dtype=torch.float32).repeat(GRID, 1), batch, uniform)
    return np.bincount(drawn.tokens, minlength=len(logits)) / GRID, drawn


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1000},
    ],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_tokens_are_drawn_with_the_probabilities_of_the_reference(limits, temperature):
    logits = logits_of(20)
    got, drawn = shares(logits, temperature=temperature, **limits)
    p = tempered(logits, temperature)
    expected = truncated(p, **limits)
    assert np.abs(got - expected).max() < 1.5 / GRID + 1e-6
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(drawn.log_probs, np.log(p[drawn.tokens]), atol=1e-5)


@pytest.mark.parametrize(
    "limits", [{"top_p": 0.9}, {"top_p": 0.99}, {"top_k": 2 * HEAD}, {"min_p": 0.001}, {"top_k": 3}]
)
def test_truncation_is_exact_where_the_most_likely_tokens_are_not_enough(limits):
    logits = logits_of(4 * HEAD, scale=0.5)
    got, _ = shares(logits, **limits)
    expected = truncated(tempered(logits, 1.0), **limits)
    assert np.abs(np.cumsum(np.sort(got)) - np.cumsum(np.sort(expected))).max() < 0.02
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(expected))
    assert (got > 0).sum() > 0.8 * min((expected > 0).sum(), GRID / 8) or limits == {"top_k": 3}


def test_rows_of_one_batch_keep_to_their_own_parameters():
    logits = torch.tensor(logits_of(12)).float()
    params = [{"temperature": 0}, {"top_k": 1}, {"temperature": 0.5}, {"top_p": 0.01}, {}]
    uniform = torch.full((5,), 0.9999)
    together = sample(logits.repeat(5, 1), SamplingBatch.of([request([0], 1, **p) for p in params]), uniform)
    for row, p in enumerate(params):
        alone = sample(logits[None].clone(), SamplingBatch.of([request([0], 1, **p)]), uniform[:1])
        assert (together.tokens[row], together.log_probs[row]) == (alone.tokens[0], alone.log_probs[0])
    best = int(logits.argmax())
    assert [together.tokens[i] == best for i in range(5)] == [True, True, False, True, False]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((3, 6), -torch.inf)
    logits[:, 2:4] = 0
    batch = SamplingBatch.of([request([0], 1)] * 3)
    drawn = sample(logits, batch, torch.tensor([2.0**-24, 0.5, 1.0]))
    assert drawn.tokens == [2, 2, 3]


def test_stop_tokens_are_not_drawn_before_min_new_tokens():
    logits = torch.zeros(1, 4)
    logits[0, 3] = 50.0
    early = request([0], 5, min_new_tokens=1, stop_token_ids=(3,))
    late = request([0], 5, min_new_tokens=1, stop_token_ids=(3,))
    late.append(0, -1.0)
    uniform = torch.tensor([0.7])
    assert sample(logits.clone(), SamplingBatch.of([early]), uniform).tokens == [2]
    assert sample(logits.clone(), SamplingBatch.of([late]), uniform).tokens == [3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_told_and_spoil_no_other_row(bad):
    logits = torch.tensor(logits_of(8)).float().repeat(3, 1)
    logits[1, 5] = bad
    batch = SamplingBatch.of([request([0], 1, top_k=3), request([0], 1, top_k=3), request([0], 1)])
    uniform = torch.tensor([0.3, 0.3, 0.3])
    drawn = sample(logits.clone(), batch, uniform)
    alone = sample(logits[:1].clone(), SamplingBatch.of([request([0], 1, top_k=3)]), uniform[:1])
    assert drawn.finite == [True, False, True]
    assert drawn.tokens[0] == alone.tokens[0]


def test_uniform_numbers_are_uniform_and_independent_over_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64), indexing="ij")
    u = uniforms(seeds.ravel(), positions.ravel()).double().numpy().reshape(200, 200)
    assert u.min() > 0 and u.max() <= 1
    # Kolmogorov-Smirnov at 1e-6 for 40,000 draws; correlation of neighbours within five standard errors.
    ranks = np.arange(1, u.size + 1) / u.size
    assert np.abs(np.sort(u.ravel()) - ranks).max() < 2.7 / 200
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / 200


def test_uniform_number_is_a_function_of_seed_and_position_alone():
    seeds, positions = np.array([5, 9, 5], np.uint64), np.array([3, 3, 4], np.uint64)
    together = uniforms(seeds, positions)
    for i in range(3):
        assert uniforms(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert len(set(together.tolist())) == 3


def test_long_rows_are_drawn_with_the_probabilities_of_the_reference():
    """Longer than two blocks, and no multiple of one; a third of the tokens can't be drawn, whole blocks among them."""
    size = 3 * BLOCK + 37
    logits = logits_of(size)
    logits[BLOCK : 2 * BLOCK] = -np.inf
    logits[-5:] = -np.inf
    got, drawn = shares(logits)
    p = tempered(logits, 1.0)
    assert np.abs(np.cumsum(got) - np.cumsum(p)).max() < 1.5 / GRID
    assert (p[drawn.tokens] > 0).all()
    np.testing.assert_allclose(drawn.log_probs, np.log(p[drawn.tokens]), atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_penalties_change_what_is_drawn_by_sglangs_rule_and_not_the_log_probs(temperature):
    logits, seen = logits_of(12), [3, 3, 3, 5]
    sequence = request(
        [7], 9, temperature=temperature, frequency_penalty=0.5, presence_penalty=-0.3, repetition_penalty=1.4
    )
    for token in seen:
        sequence.append(token, 0.0)
    uniform = (torch.arange(GRID) + 0.5) / GRID
    drawn = sample(torch.tensor(logits).float().repeat(GRID, 1), SamplingBatch.of([sequence] * GRID), uniform)
    changed = logits.copy()
    for token, count in ((3, 3), (5, 1)):
        changed[token] -= 0.5 * count - 0.3
        changed[token] = changed[token] / 1.4 if changed[token] > 0 else changed[token] * 1.4
    got = np.bincount(drawn.tokens, minlength=12) / GRID
    assert np.abs(got - tempered(changed, temperature)).max() < 1.5 / GRID + 1e-6
    np.testing.assert_allclose(drawn.log_probs, np.log(tempered(logits, temperature)[drawn.tokens]), atol=1e-5)
