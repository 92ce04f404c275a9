"""A whole batch in, on every rank; the optimizer steps it is worth, then checkpoints, exports and published weights out.

    read_batch ──▶ plan ──▶ own log-probs (only with --use-tis and several steps)
                     │
                     └──▶ for each optimizer step: micro-batches (forward, loss, backward) ──▶ checks ──▶ clip ──▶ AdamW

Ranks run in step: the same number of micro-batches each, one collective per optimizer step for sums and failures. What is
wrong on one rank is therefore raised on all of them, before that step changes the weights.
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
from miles.errors import TrainerError
from miles.train import checkpoint, random_state
from miles.train.batch import MicroBatch, RolloutBatch, TrainSample, collate, fill_up, read_batch
from miles.train.export import save_hf, write_version
from miles.train.losses import SUMS, metrics, policy_loss
from miles.train.model import Policy, compute_dtype, load_model, shard
from miles.train.optimizer import clip_gradients, make_optimizer
from miles.train.packing import plan
from miles.train.schedule import learning_rate
from miles.train.segments import write_segment
from miles.train.sender import WeightSender, gather_buckets
from miles.types import Weights


class TrainerRank:
    """One rank of the trainer, in its own process: ranks are called alike and work on their share of the same batch.

    ``init_method``: where the process group meets, a torch URL ("tcp://host:port" or "file://..."). ``total_steps``: training
    steps (batches) of the whole run, which the learning-rate schedule spans.
    """

    def __init__(self, settings: Settings, *, rank: int, world_size: int, init_method: str, total_steps: int) -> None:
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
        shard(model, init_device_mesh(device.type, (world_size,)), dtype)
        self._settings = settings
        self._train = settings.train
        self._rank, self._world_size = rank, world_size
        self._policy = Policy(model, dtype, device, settings.sampling.rollout_temperature)
        self._optimizer = make_optimizer(model, settings.train)
        self._optimizer_steps = total_steps * settings.optimizer_steps
        self._source = Path(str(settings.model.hf_checkpoint))
        self._sender: WeightSender | None = None
        self._host = urlsplit(init_method).hostname or "127.0.0.1"
        self._next_step = 0

    def train(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Takes all optimizer steps of training step ``step``; returns the same metrics on every rank.

        Values are means over its optimizer steps, the learning rate that of the last. Raises `TrainerError` for a sample that
        can't be trained, and before an optimizer step is taken for a log-prob or a gradient that isn't finite.
        """
        started = time.perf_counter()
        steps = read_batch(
            batch, self._train, optimizer_steps=self._settings.optimizer_steps, vocabulary=self._policy.vocabulary
        )
        plans = [self._micro_batches(samples) for samples in steps]
        own = self._own_log_probs(plans)
        taken = []
        for i, (micro_batches, old) in enumerate(zip(plans, own, strict=True)):
            lr = learning_rate(step * len(plans) + i, self._optimizer_steps, self._train)
            try:
                taken.append(self._optimizer_step(micro_batches, old, lr, f"training step {step}, optimizer step {i}"))
            finally:
                self._optimizer.zero_grad()
        self._next_step = step + 1
        values = {f"train/{name}": sum(m[name] for m in taken) / len(taken) for name in taken[0]}
        return values | {
            "train/lr-pg_0": lr,
            "perf/actor_train_time": time.perf_counter() - started,
            "perf/train_tokens": float(sum(len(t) for t in batch["tokens"])),
        }

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

    @torch.no_grad()
    def _own_log_probs(self, plans: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """The trainer's log-probs before the first optimizer step. With a single step they are the current ones: None."""
        if not self._train.use_tis or len(plans) == 1:
            return [[None] * len(micro_batches) for micro_batches in plans]
        return [[self._policy.log_probs(micro)[0] for micro in micro_batches] for micro_batches in plans]

    def _optimizer_step(
        self, micro_batches: Sequence[MicroBatch], own: Sequence[Tensor | None], lr: float, where: str
    ) -> dict[str, float]:
        device = self._policy.device
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        failed = torch.full((1,), -1, dtype=torch.int64, device=device)
        for micro, old in zip(micro_batches, own, strict=True):
            log_probs, entropy = self._policy.log_probs(micro)
            loss, part = policy_loss(log_probs, entropy, micro.inputs, old, self._train)
            loss.backward()  # type: ignore[no-untyped-call]
            sums += part
            failed = torch.cat([failed, micro.samples.masked_fill(log_probs.isfinite(), -1)]).amax(0, keepdim=True)
        sums, failed_sample = self._reduce(sums, failed)
        if failed_sample >= 0:
            raise TrainerError(
                f"{where}: a log-prob of sample {failed_sample} isn't finite under the trainer's weights"
            )
        norm = clip_gradients(self._optimizer, self._train.clip_grad)
        if not math.isfinite(norm):
            raise TrainerError(f"{where}: the gradient norm is {norm}; the weights are those of the step before")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return metrics(sums, self._train) | {"grad_norm": norm}

    def _reduce(self, sums: Tensor, failed: Tensor) -> tuple[Tensor, int]:
        """Over all ranks: the sums added up, and the index of a sample that failed on any of them, or -1."""
        own = torch.cat([sums, failed.double()]).cpu()
        everyone = own.new_empty(self._world_size * len(own))
        dist.all_gather_single(everyone, own)
        rows = everyone.view(self._world_size, len(own))
        return rows[:, :-1].sum(0), int(rows[:, -1].max())

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
        checkpoint.save(folder, self._policy, self._optimizer if optimizer else None, self._next_step)
        random_state.save(folder, self._rank)

    def load(self, folder: str) -> int:
        """Goes on from a checkpoint, of any number of ranks. Returns the training step that comes next."""
        self._next_step = checkpoint.load(folder, self._policy, self._optimizer)
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
