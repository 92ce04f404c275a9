"""A tiny model and batches for it; the trainer under test, and a float64 reference that knows nothing of its code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.config.owners import ModelSettings, RolloutSettings, SamplingSettings, TrainSettings
from miles.config.settings import Settings
from miles.engine.segment import Manifest, Segment
from miles.train.rank import TrainerRank

VOCABULARY = 61


def save_model(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 7) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def make_settings(model: Path, *, temperature: float = 1.0, ranks: int = 1, dtype: str = "float32", groups: int = 3,
                  samples: int = 4, freeze_embeddings: bool = False, **train: Any) -> Settings:  # fmt: skip
    """Gradient descent unless ``train`` says otherwise: with a huge epsilon AdamW's first step is the gradient itself."""
    descent = {"lr": 1e7, "adam_eps": 1e7, "clip_grad": 0.0, "max_tokens_per_gpu": 4096}
    return Settings(
        model=ModelSettings(hf_checkpoint=str(model), dtype=dtype, freeze_embeddings=freeze_embeddings),
        sampling=SamplingSettings(rollout_temperature=temperature),
        rollout=RolloutSettings(rollout_batch_size=groups, n_samples_per_prompt=samples),
        train=TrainSettings(**descent | {"actor_num_gpus_per_node": ranks} | train),
    )


def make_batch(*, groups: int = 3, samples: int = 4, seed: int = 0) -> dict:
    """Columns with prompts and responses of mixed length, tool tokens masked inside some responses."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6))
        for _ in range(samples):
            length = int(rng.integers(1, 12))
            mask = (rng.random(length) < 0.8).astype(np.uint8)
            mask[0] = 1
            rows.append(
                {
                    "tokens": np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]).astype(np.int32),
                    "response_lengths": length,
                    "loss_masks": mask,
                    "rollout_log_probs": rng.normal(-4, 0.5, length).astype(np.float32),
                    "raw_reward": float(rng.integers(0, 3)),
                    "group_ids": group,
                    "sample_indices": 100 + len(rows),
                    "rollout_ids": 100 + len(rows),
                    "truncated": 0,
                }
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def with_model_log_probs(batch: dict, model: Path, temperature: float = 1.0) -> dict:
    """The batch as an engine with the same weights would have sampled it: its log-probs are the model's own."""
    log_probs = [
        lp.detach().numpy().astype(np.float32) for lp in reference_log_probs(load64(model), batch, temperature)
    ]
    return batch | {"rollout_log_probs": log_probs}


@contextmanager
def running(
    settings: Settings,
    folder: Path,
    *,
    rank: int = 0,
    store: str,
    total_steps: int = 10,
    reference: str | None = None,
) -> Iterator[TrainerRank]:
    """One rank, met by the others over the file ``store`` in ``folder``; a store serves one process group."""
    try:
        yield TrainerRank(
            settings,
            rank=rank,
            world_size=settings.trainer_ranks,
            init_method=f"file://{folder}/{store}",
            total_steps=total_steps,
            reference=reference,
        )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def weights_of(trainer: TrainerRank, folder: Path) -> dict[str, torch.Tensor]:
    """What the trainer publishes, copied out of its segment."""
    path = Path(trainer.write_weights(1, str(folder), frozenset(), "shm").path)
    return {name: view.clone() for name, view in Segment(path, Manifest.load(folder)).tensors.items()}


def load64(model: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()


def reference_log_probs(model64, batch: dict, temperature: float = 1.0) -> list[torch.Tensor]:
    """One sample at a time, unpadded, all positions: log-probs of every response token, float64 with gradients."""
    found = []
    for tokens, length in zip(batch["tokens"], batch["response_lengths"], strict=True):
        ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
        log_probs = torch.log_softmax(model64(input_ids=ids[None]).logits[0] / temperature, dim=-1)
        found.append(torch.stack([log_probs[t - 1, ids[t]] for t in range(len(ids) - length, len(ids))]))
    return found


def reference_advantages(batch: dict) -> list[float]:
    values = []
    for reward, group in zip(batch["raw_reward"], batch["group_ids"], strict=True):
        members = [r for r, g in zip(batch["raw_reward"], batch["group_ids"], strict=True) if g == group]
        mean = sum(members) / len(members)
        std = (sum((r - mean) ** 2 for r in members) / (len(members) - 1)) ** 0.5
        values.append((reward - mean) / (std + 1e-6) if std > 0 else 0.0)
    return values


def reference_gradient(
    model: Path, batch: dict, *, per_token: bool = False, clip: float = 0.2, temperature: float = 1.0
):
    """Loss and gradients of one optimizer step over the whole batch, term by term in float64."""
    model64 = load64(model)
    terms, counts = [], []
    log_probs = reference_log_probs(model64, batch, temperature)
    for i, advantage in enumerate(reference_advantages(batch)):
        total = torch.zeros((), dtype=torch.float64)
        for t, active in enumerate(batch["loss_masks"][i]):
            if active:
                ratio = torch.exp(log_probs[i][t] - float(batch["rollout_log_probs"][i][t]))
                total = total + torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - clip, 1 + clip))
        terms.append(total)
        counts.append(int(sum(batch["loss_masks"][i])))
    sample_mean = sum(t / c for t, c in zip(terms, counts, strict=True) if c) / len(terms)
    loss = sum(terms) / sum(counts) if per_token else sample_mean
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model64.named_parameters()}


def select(batch: dict, positions) -> dict:
    return {name: [column[i] for i in positions] for name, column in batch.items()}


def changed(settings: Settings, **train: Any) -> Settings:
    return replace(settings, train=replace(settings.train, **train))
