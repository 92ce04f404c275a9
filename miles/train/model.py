"""A Hugging Face folder in, a causal LM sharded over the trainer's ranks out, and the log-probs of a micro-batch from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.config.owners import ModelSettings
from miles.engine.local.model_config import choose_dtype
from miles.errors import TrainerError
from miles.train.batch import MicroBatch
from miles.train.log_probs import token_log_probs

SHORT_ROW = 192
"""Up to this many tokens the batched-matmul attention beats the fused one on a CPU in bfloat16 (its backward 4x at 40)."""


def compute_dtype(setting: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """``--dtype`` as torch's. Auto is the engines' choice on a CPU; on a GPU bfloat16 for any 16-bit checkpoint."""
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(checkpoint).dtype or torch.float32
    if setting == "auto" and device.type == "cuda":
        return torch.bfloat16 if stored.itemsize == 2 else torch.float32
    return choose_dtype(setting, stored)


def load_model(settings: ModelSettings, device: torch.device, flag: str = "--hf-checkpoint") -> Any:
    """The transformers model of ``--hf-checkpoint``: float32 master weights, still unsharded and on the CPU.

    It stays in evaluation mode: dropout would make its log-probs differ from the engine's. Raises `TrainerError` where the
    folder, the one of ``flag``, holds no causal LM.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import is_flash_attn_2_available, logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.hf_checkpoint, dtype=torch.float32).eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainerError(f"{flag} {settings.hf_checkpoint} can't be loaded as a causal LM: {error}") from error
    # Some checkpoints ship sampling defaults that transformers refuses to save again; exports copy the file instead.
    model.generation_config = GenerationConfig()
    if settings.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    if device.type == "cuda" and is_flash_attn_2_available() and model._supports_flash_attn and not model._is_stateful:
        model.set_attn_implementation("flash_attention_2")
    return model


def shard(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2, in place: one unit per decoder layer and one for the rest, compute in ``dtype``, gradients summed in float32.

    The sum, not FSDP's mean, because `token_weights` has normalised over all ranks already. On a CPU, memory is the
    host's: layers stay gathered between forward and backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    regather = mesh.device_type == "cuda" and mesh.size() > 1
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for module in [*layers, model]:
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=regather)
        if mesh.size() > 1:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


@dataclass(frozen=True)
class Policy:
    """The sharded model (`shard`), with what a forward pass through it needs to know."""

    model: Any
    dtype: torch.dtype
    device: torch.device
    temperature: float

    @property
    def packs_rows(self) -> bool:
        """Whether attention keeps the samples of a packed row apart without a mask: flash attention, by position ids."""
        return "flash" in self.model.config._attn_implementation

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer, under its first name in the state dict: a tied head isn't repeated."""
        first: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), (name, tensor.detach()))
        return dict(first.values())

    def log_probs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob of each predicted token and the entropy of the distribution that it is from; [P], float32."""
        return token_log_probs(self.logits(micro), micro.targets, self.temperature)

    def logits(self, micro: MicroBatch) -> Tensor:
        """Those that predict each token of ``micro.targets``, before the temperature; [P, V], in the compute type.

        Rows have no attention mask: padding comes after all real tokens, so causality hides it, and attention runs
        unmasked. Only the positions that predict one of those tokens pass through the head.
        """
        with self._head_reads_only(micro.predicts), self._attention_kernel(micro.width):
            output = self.model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False)
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def _head_reads_only(self, positions: Tensor) -> Iterator[None]:
        """Within, the head is given ``positions`` of the flattened batch, and logits come out as [N, V]."""
        head: nn.Module = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1)[positions],))
        try:
            yield
        finally:
            handle.remove()

    def _attention_kernel(self, width: int) -> AbstractContextManager[None]:
        slow = self.device.type == "cpu" and self.dtype == torch.bfloat16 and width <= SHORT_ROW
        return sdpa_kernel(SDPBackend.MATH) if slow else nullcontext()
