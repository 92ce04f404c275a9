"""The same batch through TRL's GRPO loss and through ours: equal loss and gradient. Needs TRL 1.16, which is no dependency.

TRL's method runs on a stand-in for its trainer that holds what the loss reads, so that no model and no accelerator is needed.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from miles.config.owners import TrainSettings
from miles.train.losses import LossInputs, policy_loss
from miles.train.normalisation import token_weights

trl = pytest.importorskip("trl")
if not trl.__version__.startswith("1.16."):
    pytest.skip(f"TRL {trl.__version__} is another one", allow_module_level=True)

LENGTHS = (1, 9, 4, 12)
WIDTH = 12


def batch():
    """Rows padded to the width, some tokens of two samples masked; float64."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]).double()
    mask[1, 2:4] = mask[3, 5] = 0

    def near(values, spread):
        return values + spread * torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)

    rollout = near(torch.full((len(LENGTHS), WIDTH), -2.0, dtype=torch.float64), 1.0)
    columns = {
        "rollout": rollout,
        "own": near(rollout, 0.3),
        "log_probs": near(rollout, 0.3),
        "ref": near(rollout, 0.5),
    }
    return columns | {"mask": mask, "advantages": torch.tensor([1.0, -0.5, 0.7, -1.2], dtype=torch.float64)}


def of_trl(b, *, old, loss_type, level="token", beta=0.0, unbiased=False, delta=None, clip_c=None, tis=None):
    log_probs = b["log_probs"].clone().requires_grad_()
    trainer = trl.GRPOTrainer
    stand_in = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, _entropy_bonus_enabled=False, model=SimpleNamespace(training=False),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        off_policy_mask_threshold=delta, get_off_policy_mask=trainer.get_off_policy_mask, importance_sampling_level=level,
        beta=beta, args=SimpleNamespace(use_bias_correction_kl=unbiased, delta=clip_c), loss_type=loss_type,
        epsilon_low=0.2, epsilon_high=0.28, use_vllm=tis is not None, vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(reduce=lambda values, reduction: values, gather=lambda values: values),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]), "completion_ids": ids,
        "completion_mask": b["mask"], "advantages": b["advantages"], "old_per_token_logps": b[old],
        "sampling_per_token_logps": b["rollout"], "ref_per_token_logps": b["ref"], "importance_sampling_ratio": tis,
    }  # fmt: skip
    loss = trainer._compute_loss(stand_in, None, inputs)
    loss.backward()
    return loss.item(), log_probs.grad[b["mask"] > 0]


def of_ours(b, **train):
    settings = TrainSettings(eps_clip=0.2, eps_clip_high=0.28, **train)
    kept = b["mask"] > 0
    counts = kept.sum(1).tolist()
    weights = torch.tensor(token_weights(counts, per_token=settings.calculate_per_token_loss))
    log_probs = b["log_probs"][kept].clone().requires_grad_()
    inputs = LossInputs(
        b["rollout"][kept],
        b["advantages"].repeat_interleave(torch.tensor(counts)),
        weights.repeat_interleave(torch.tensor(counts)),
        tuple(counts),
        b["own"][kept],
        b["ref"][kept] if settings.use_kl_loss else None,
    )
    part = policy_loss(log_probs, torch.zeros_like(log_probs), inputs, settings)
    part.loss.backward()
    return part.loss.item(), log_probs.grad


KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
CASES = {
    "sample-mean": ({"loss_type": "grpo"}, {}),
    "token-mean": ({"loss_type": "bnpo"}, {"calculate_per_token_loss": True}),
    "gspo": ({"loss_type": "grpo", "level": "sequence"}, {"advantage_estimator": "gspo"}),
    "kl": ({"loss_type": "grpo", "beta": 0.3}, KL),
    "unbiased-kl": ({"loss_type": "bnpo", "beta": 0.3, "unbiased": True}, {
        **KL, "use_unbiased_kl": True, "calculate_per_token_loss": True,
    }),
    "opsm": ({"loss_type": "grpo", "delta": 0.0}, {"use_opsm": True, "opsm_delta": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name):
    theirs, ours = CASES[name]
    b = batch()
    expected, gradient = of_trl(b, old="rollout", **theirs)
    found, own_gradient = of_ours(b, **ours)
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-6, atol=1e-9)


def test_truncated_importance_weights_are_those_of_trl():
    b = batch()
    weights = (b["own"] - b["rollout"]).exp().clamp(max=1.3)
    expected, gradient = of_trl(b, old="own", loss_type="grpo", tis=weights)
    found, own_gradient = of_ours(b, use_tis=True, tis_clip=1.3)
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-6, atol=1e-9)
