"""Log-probs and entropies are those of a float64 softmax, whatever dtype and chunk size."""

import numpy as np
import pytest
import torch

from miles.train import log_probs
from miles.train.log_probs import token_log_probs

V = 33


def reference(logits, targets, temperature):
    scaled = logits.astype(np.float64) / temperature
    log_p = (
        scaled
        - np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - scaled.max(-1, keepdims=True)
    )
    return log_p[np.arange(len(targets)), targets], -(np.exp(log_p) * log_p).sum(-1)


def some_logits(n=11, scale=4.0):
    rng = np.random.default_rng(3)
    return rng.normal(0, scale, (n, V)).astype(np.float32), rng.integers(0, V, n)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_values_equal_the_reference(temperature, rows, monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", rows * V)
    logits, targets = some_logits()
    found, entropy = token_log_probs(torch.tensor(logits), torch.tensor(targets), temperature)
    expected, expected_entropy = reference(logits, targets, temperature)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy.numpy(), expected_entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of", ["log_probs", "entropy", "both"])
def test_gradient_equals_that_of_autograd_in_float64(of, monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", 3 * V)
    logits, targets = some_logits()
    weights = torch.linspace(-1, 1, len(targets))
    a, b = float(of != "entropy"), float(of != "log_probs")

    mine = torch.tensor(logits, requires_grad=True)
    values = token_log_probs(mine, torch.tensor(targets), 0.7)
    used = [c * (weights * v).sum() for c, v in zip((a, b), values, strict=True) if c]
    sum(used).backward()

    exact = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(exact / 0.7, -1)
    chosen = log_p.gather(1, torch.tensor(targets)[:, None])[:, 0]
    (a * (weights * chosen).sum() - b * (weights * (log_p.exp() * log_p).sum(-1)).sum()).backward()
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_bfloat16_logits_are_read_in_float32_and_get_a_bfloat16_gradient():
    logits, targets = some_logits()
    half = torch.tensor(logits).bfloat16().requires_grad_()
    found, _ = token_log_probs(half, torch.tensor(targets))
    np.testing.assert_allclose(
        found.detach().numpy(), reference(half.detach().float().numpy(), targets, 1.0)[0], rtol=1e-5
    )
    found.sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_logits_are_left_as_they_were():
    logits, targets = some_logits()
    mine = torch.tensor(logits, requires_grad=True)
    token_log_probs(mine, torch.tensor(targets), 0.5)[0].sum().backward()
    np.testing.assert_array_equal(mine.detach().numpy(), logits)


def test_no_tokens_give_no_values_and_no_gradient():
    logits = torch.zeros(0, V, requires_grad=True)
    found, entropy = token_log_probs(logits, torch.zeros(0, dtype=torch.int64))
    assert found.shape == entropy.shape == (0,)
    found.sum().backward()
    assert logits.grad.shape == (0, V)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    found, entropy = token_log_probs(logits, torch.tensor([1]))
    assert found.item() == -2e4
    assert entropy.item() == pytest.approx(0.0, abs=1e-3)
