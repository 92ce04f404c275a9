"""A whole batch in, on every rank; the optimizer steps it is worth, then checkpoints, exports and published weights out.

    read_batch ──▶ plan ──▶ own log-probs (only with --use-tis and several steps), the reference's, advantages of tokens
                     │
                     └──▶ for each optimizer step: micro-batches (forward, loss, backward) ──▶ checks ──▶ clip ──▶ AdamW

Ranks run in step: the same number of micro-batches each, one exchange per optimizer step for sums and failures. What is
wrong on one rank, a user's loss included, is therefore raised on all of them, before that step changes the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from miles.config import Settings
from miles.errors import HookError, TrainerError
from miles.train import checkpoint, random_state
from miles.train.batch import MicroBatch, RolloutBatch, TrainSample, collate, fill_up, read_batch
from miles.train.exchange import exchange, failing_sample
from miles.train.export import save_hf, write_version
from miles.train.loss_hooks import LossHooks, ParallelState
from miles.train.losses import Part, metrics, policy_loss, sft_loss
from miles.train.model import Policy, compute_dtype, load_model, shard
from miles.train.optimizer import clip_gradients, make_optimizer
from miles.train.packing import plan
from miles.train.prepare import prepare
from miles.train.reference import follow, load_reference
from miles.train.schedule import learning_rate
from miles.train.segments import write_segment
from miles.train.sender import WeightSender, gather_buckets
from miles.types import Weights


class TrainerRank:
    """One rank of the trainer, in its own process: ranks are called alike and work on their share of the same batch.

    ``init_method``: where the process group meets, a torch URL ("tcp://host:port" or "file://..."). ``total_steps``: training
    steps (batches) of the whole run, which the learning-rate schedule spans. ``reference``: folder of the reference policy;
    None: there is none.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        total_steps: int,
        reference: str | None = None,
    ) -> None:
        torch.set_num_threads(settings.model.torch_threads)
        torch.manual_seed(settings.model.seed)
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        model = load_model(settings.model, device)
        dtype = compute_dtype(settings.model.dtype, settings.model.hf_checkpoint, device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=init_method, rank=rank, world_size=world_size
        )
        mesh = init_device_mesh(device.type, (world_size,))
        shard(model, mesh, dtype)
        self._settings = settings
        self._train = settings.train
        self._rank, self._world_size = rank, world_size
        self._policy = Policy(model, dtype, device, settings.sampling.rollout_temperature)
        self._reference = None
        if reference is not None:
            moves = settings.train.ref_update_interval is not None
            self._reference = load_reference(reference, settings.model, self._policy, mesh, moves=moves)
        self._hooks = LossHooks(settings, settings.namespace(), ParallelState(rank, world_size))
        self._optimizer = make_optimizer(model, settings.train)
        self._optimizer_steps = total_steps * settings.optimizer_steps
        self._source = Path(str(settings.model.hf_checkpoint))
        self._sender: WeightSender | None = None
        self._host = urlsplit(init_method).hostname or "127.0.0.1"
        self._next_step = 0

    def train(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Takes all optimizer steps of training step ``step``; returns the same metrics on every rank.

        Values are means over its optimizer steps, the learning rate that of the last. Raises `TrainerError` for a sample that
        can't be trained, and before an optimizer step is taken for a log-prob or a gradient that isn't finite; `HookError`
        then for a hook of the loss that fails.
        """
        started = time.perf_counter()
        steps = read_batch(
            batch, self._train, optimizer_steps=self._settings.optimizer_steps, vocabulary=self._policy.vocabulary
        )
        plans = [self._micro_batches(samples) for samples in steps]
        plans, prepared = prepare(plans, self._policy, self._reference, self._train)
        taken = []
        for i, micro_batches in enumerate(plans):
            lr = learning_rate(step * len(plans) + i, self._optimizer_steps, self._train)
            try:
                taken.append(self._optimizer_step(micro_batches, lr, f"training step {step}, optimizer step {i}"))
            finally:
                self._optimizer.zero_grad()
        self._next_step = step + 1
        interval = self._train.ref_update_interval
        if self._reference is not None and interval is not None and self._next_step % interval == 0:
            follow(self._reference, self._policy)
        values = {f"train/{name}": value for name, value in _means(taken).items()}
        return values | prepared | {
            "train/lr-pg_0": lr,
            "perf/actor_train_time": time.perf_counter() - started,
            "perf/train_tokens": float(sum(len(t) for t in batch["tokens"])),
        }  # fmt: skip

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        samples = fill_up(samples, self._world_size)
        packed = self._policy.packs_rows
        bins = plan(
            [s.input_length for s in samples],
            ranks=self._world_size,
            max_tokens=self._train.max_tokens_per_gpu,
            micro_batch_size=self._train.micro_batch_size,
            padded=not packed,
        )[self._rank]
        return [collate([samples[i] for i in members], packed=packed, device=self._policy.device) for members in bins]

    def _optimizer_step(self, micro_batches: Sequence[MicroBatch], lr: float, where: str) -> dict[str, float]:
        parts: list[Part] = []
        failed: list[Tensor] = []
        hook_error = ""
        for micro in micro_batches:
            output, entropy = self._forward(micro)
            try:
                part = self._loss(micro, output, entropy)
            except HookError as error:
                # The other ranks wait for this one's backward pass; the failure is raised on all of them below.
                hook_error, part = hook_error or str(error), Part(0.0 * output.sum())
            part.loss.backward()  # type: ignore[no-untyped-call]
            parts.append(part)
            if entropy is not None:
                failed.append(failing_sample(output, micro.samples))
        shares, sums = exchange(parts, failed, hook_error, where)
        norm = clip_gradients(self._optimizer, self._train.clip_grad)
        if not math.isfinite(norm):
            raise TrainerError(f"{where}: the gradient norm is {norm}; the weights are those of the step before")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return metrics(shares, sums) | {"grad_norm": norm}

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of the trained tokens; for a user's own loss the logits, and None."""
        if self._train.loss_type == "custom_loss":
            return self._policy.logits(micro), None
        return self._policy.log_probs(micro)

    def _loss(self, micro: MicroBatch, output: Tensor, entropy: Tensor | None) -> Part:
        if entropy is None:
            return self._hooks.loss(micro, output)
        if self._train.loss_type == "sft_loss":
            return sft_loss(output, entropy, micro.inputs)
        return policy_loss(output, entropy, micro.inputs, self._train, self._hooks.policy(micro))

    def write_weights(self, version: int, folder: str, busy: frozenset[str], kind: str) -> Weights:
        """Makes the weights readable as ``version``: in ``folder`` as a segment ("shm") or a Hugging Face folder ("disk"),
        or from a sender on rank 0 ("broadcast").

        No path in ``busy`` is written or removed. When it returns, every rank has given all it has.
        """
        policy = self._policy
        if kind == "broadcast":
            return self._hold_for_broadcast(version)
        if kind == "shm":
            return write_segment(policy.tensors(), policy.dtype, version, Path(folder), busy)
        return write_version(Path(folder), policy, self._source, version, busy)

    def _hold_for_broadcast(self, version: int) -> Weights:
        policy = self._policy
        size = self._settings.engine.update_weight_buffer_size
        buckets = gather_buckets(policy.tensors(), policy.dtype, size)
        if self._rank != 0:
            return Weights(version, "broadcast", "")
        if self._sender is None:
            self._sender = WeightSender(self._host, policy.device)
        return self._sender.hold(version, buckets)

    def save(self, folder: str, *, optimizer: bool) -> None:
        """Writes a checkpoint into an existing folder, its optimizer state only where asked for."""
        moving = self._reference if self._train.ref_update_interval is not None else None
        checkpoint.save(folder, self._policy, self._optimizer if optimizer else None, self._next_step, moving)
        random_state.save(folder, self._rank)

    def load(self, folder: str) -> int:
        """Goes on from a checkpoint, of any number of ranks. Returns the training step that comes next."""
        self._next_step = checkpoint.load(folder, self._policy, self._optimizer, self._reference)
        random_state.load(folder, self._rank)
        return self._next_step

    def export_hf(self, folder: str) -> None:
        """Writes a folder that transformers loads, in the compute type."""
        save_hf(Path(folder), self._policy, self._source)

    def close(self) -> None:
        """Leaves the process group; twice is fine."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each metric, over the optimizer steps that have it: a hook may leave one out."""
    found = {name: [m[name] for m in steps if name in m] for name in dict.fromkeys(n for m in steps for n in m)}
    return {name: sum(values) / len(values) for name, values in found.items()}
