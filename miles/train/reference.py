"""A folder in, the frozen policy that KL terms are measured against out: sharded as the trained one is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from miles.config.owners import ModelSettings
from miles.errors import TrainerError
from miles.train import checkpoint
from miles.train.model import Policy, load_model, shard


def load_reference(folder: str, settings: ModelSettings, policy: Policy, mesh: DeviceMesh, *, moves: bool) -> Policy:
    """The reference from a folder in Hugging Face format, or from one checkpoint of a run of the same model.

    Its weights are float32 shards, 4 bytes per parameter over all ranks. ``moves``: it will `follow` the policy, so it has to
    be the same kind of model. Raises `TrainerError` where it doesn't fit.
    """
    hugging_face = (Path(folder) / "config.json").is_file()
    settings = replace(settings, hf_checkpoint=folder) if hugging_face else settings
    model = load_model(settings, policy.device, "--ref-load").requires_grad_(False)
    shard(model, mesh, policy.dtype)
    reference = replace(policy, model=model)
    if reference.vocabulary != policy.vocabulary:
        raise TrainerError(
            f"--ref-load {folder}: the reference knows {reference.vocabulary} tokens, the policy {policy.vocabulary}; "
            "a model with the policy's tokenizer works"
        )
    shapes, own = ({n: t.shape for n, t in p.tensors().items()} for p in (policy, reference))
    if moves and shapes != own:
        raise TrainerError(
            f"--ref-load {folder}: --ref-update-interval needs a reference of the same kind as the policy; "
            "a checkpoint of it works"
        )
    if not hugging_face:
        checkpoint.load_policy(folder, reference)
    return reference


@torch.no_grad()
def follow(reference: Policy, policy: Policy) -> None:
    """Makes the reference what the policy is now. Both are sharded alike, so each rank copies its own."""
    source = policy.tensors()
    for name, tensor in reference.tensors().items():
        tensor.copy_(source[name])
