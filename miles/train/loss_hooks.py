"""Flat trained tokens in, the shapes of users' hooks out, and back: a user's own loss, off-policy correction and reducer.

Hooks see samples: lists with one tensor per sample, or flat vectors of R entries, the response tokens of all samples end to
end. Inside, vectors hold the N trained tokens alone. What a hook gets at masked tokens is 0, what it says there isn't read.

All sums that hooks make are over the samples of one micro-batch; the trainer divides them by what the whole optimizer step
has (`TrainSample.terms`), so any that add up over samples give the same for all micro-batches and ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.config import Settings
from miles.errors import HookError
from miles.hooks import hook_failed, load_function
from miles.train.batch import MicroBatch, TrainSample
from miles.train.losses import Corrected, Part, PolicyHooks


@dataclass(frozen=True)
class ParallelState:
    """Where a hook runs: every trainer rank is data parallel."""

    dp_rank: int
    dp_size: int
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1


class Responses:
    """The samples of a micro-batch that train something, as hooks see them."""

    def __init__(self, micro: MicroBatch) -> None:
        self.samples: list[TrainSample] = [s for s in micro.members if len(s.trained)]
        self.device = micro.predicts.device
        self.lengths = [s.response_length for s in self.samples]
        self.total_lengths = [len(s.tokens) for s in self.samples]
        starts = np.cumsum([0, *self.lengths])
        places = [s.trained - len(s.tokens) + s.response_length + a for s, a in zip(self.samples, starts, strict=False)]
        self.places = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *places])).to(self.device)
        """[N], where in a flat vector [R] the trained tokens are."""

    @property
    def names(self) -> str:
        return "samples " + ", ".join(str(s.index) for s in self.samples)

    def spread(self, values_N: Tensor) -> Tensor:
        """[R], 0 at masked tokens; gradients pass."""
        return values_N.new_zeros(sum(self.lengths)).index_put((self.places,), values_N)

    def split(self, values_R: Tensor) -> list[Tensor]:
        return list(torch.split(values_R, self.lengths))

    def lists(self, values_N: Tensor) -> list[Tensor]:
        return self.split(self.spread(values_N))

    def masks(self, kept_N: Tensor | None = None) -> list[Tensor]:
        """Loss masks; ``kept_N``: what a correction has left of them."""
        ones = torch.ones(len(self.places), device=self.device) if kept_N is None else kept_N.float()
        return self.lists(ones)

    def tokens(self) -> list[Tensor]:
        return [torch.from_numpy(s.tokens).to(self.device) for s in self.samples]

    def flat(self, path: str, name: str, values: Any) -> Tensor:
        """[N] of what a hook gives: a flat vector [R] or a list with one tensor per sample."""
        if isinstance(values, list | tuple) and all(isinstance(v, Tensor) for v in values):
            values = torch.cat([v.reshape(-1) for v in values])
        if not isinstance(values, Tensor) or values.numel() != sum(self.lengths):
            count = f"{values.numel()} numbers" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise HookError(
                f"{path}: {name} is {count}; a tensor of {sum(self.lengths)} works, one for each response token of the "
                f"{len(self.samples)} samples, or a list with one for each sample"
            )
        found: Tensor = values.reshape(-1)[self.places]
        return found


class LossHooks:
    """The hooks of a run's loss, loaded. Raises `HookError` for a path that can't be."""

    def __init__(self, settings: Settings, args: Namespace, parallel: ParallelState) -> None:
        train = settings.train
        self._args, self._parallel = args, parallel
        self._per_token = train.calculate_per_token_loss
        self._loss_path = train.custom_loss_function_path if train.loss_type == "custom_loss" else None
        corrects = train.use_tis or train.get_mismatch_metrics
        self._tis_path = train.custom_tis_function_path if corrects else None
        self._reducer_path = train.custom_pg_loss_reducer_function_path
        for path in (self._loss_path, self._tis_path, self._reducer_path):
            load_function(path)

    def loss(self, micro: MicroBatch, logits_PV: Tensor) -> Part:
        """f(args, batch, logits, sum_of_sample_mean) -> (loss, metrics). Raises `HookError`."""
        responses, path = Responses(micro), self._loss_path or ""
        if not responses.samples:
            return Part(0.0 * logits_PV.sum())
        terms = responses.samples[0].terms

        def sum_of_sample_mean(values: Any) -> Tensor:
            values_N = responses.flat(path, "what sum_of_sample_mean got", values)
            return (values_N * micro.inputs.weights).sum() * terms

        result = self._call(path, responses, self._args, _batch(micro, responses), logits_PV, sum_of_sample_mean)
        if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise HookError(f"{path} returned a {type(result).__name__}; (loss, metrics) works, metrics a dict")
        loss, metrics = result
        _check_scalar(path, "its loss", loss, responses)
        shares = {name: _number(path, name, value) / terms for name, value in metrics.items()}
        return Part(loss / terms, shares | {"loss": loss / terms})

    def policy(self, micro: MicroBatch) -> PolicyHooks:
        """The user's parts of the policy loss of one micro-batch, none where it has nothing to train."""
        responses = Responses(micro)
        if not responses.samples or not (self._tis_path or self._reducer_path):
            return PolicyHooks()
        return PolicyHooks(
            correct=self._corrector(self._tis_path, responses) if self._tis_path else None,
            reduce=self._reducer(self._reducer_path, responses) if self._reducer_path else None,
        )

    def _corrector(self, path: str, responses: Responses) -> Callable[[Tensor, Tensor, Tensor], Corrected]:
        def correct(pg_N: Tensor, own_N: Tensor, rollout_N: Tensor) -> Corrected:
            result = self._call(
                path, responses, args=self._args, pg_loss=responses.spread(pg_N),
                train_log_probs=responses.lists(own_N), rollout_log_probs=responses.lists(rollout_N),
                loss_masks=responses.masks(), total_lengths=responses.total_lengths,
                response_lengths=responses.lengths, parallel_state=self._parallel, max_seq_lens=None,
            )  # fmt: skip
            if not (isinstance(result, tuple | list) and len(result) == 3 and isinstance(result[2], Mapping)):
                raise HookError(f"{path} returned a {type(result).__name__}; (pg_loss, masks, metrics) works")
            loss_N, kept_N = responses.flat(path, "pg_loss", result[0]), responses.flat(path, "masks", result[1]) != 0
            if not loss_N[kept_N].isfinite().all():
                raise HookError(f"{path} on {responses.names}: its pg_loss isn't finite at a token that it keeps")
            sums = {name: _token_sum(path, name, value, responses) for name, value in result[2].items()}
            return Corrected(loss_N, kept_N, sums)

        return correct

    def _reducer(self, path: str, responses: Responses) -> Callable[[Tensor, Tensor | None], Tensor]:
        def reduce(pg_N: Tensor, kept_N: Tensor | None) -> Tensor:
            reducer = self._call(
                path, responses, responses.total_lengths, responses.lengths, responses.masks(kept_N), self._per_token
            )
            if not callable(reducer):
                raise HookError(f"{path} returned a {type(reducer).__name__}; a function of the loss per token works")
            pg_N = pg_N if kept_N is None else torch.where(kept_N, pg_N, 0.0)
            value = self._call(path, responses, responses.spread(pg_N), function=reducer)
            _check_scalar(path, "the sum of its reducer", value, responses)
            reduced: Tensor = value / responses.samples[0].terms
            return reduced

        return reduce

    def _call(self, path: str, responses: Responses, *values: Any, function: Any = None, **named: Any) -> Any:
        function = function or load_function(path)
        try:
            return function(*values, **named)
        except HookError:
            raise
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            raise hook_failed(path, function, error, responses.names) from error


def _batch(micro: MicroBatch, responses: Responses) -> dict[str, Any]:
    """What a user's own loss finds in ``batch``: one entry per sample in each column."""
    inputs, samples = micro.inputs, responses.samples
    columns: dict[str, Any] = {name: [s.extra.get(name) for s in samples] for name in samples[0].extra}
    columns |= {
        "tokens": responses.tokens(),
        "total_lengths": responses.total_lengths,
        "response_lengths": responses.lengths,
        "loss_masks": responses.masks(),
        "rollout_log_probs": responses.lists(inputs.rollout_log_probs),
        "advantages": responses.lists(inputs.advantages),
        "sample_indices": [s.index for s in samples],
    }
    if inputs.reference_log_probs is not None:
        columns["ref_log_probs"] = responses.lists(inputs.reference_log_probs)
    return columns


def _check_scalar(path: str, name: str, value: Any, responses: Responses) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise HookError(f"{path}: {name} is {shown}; a scalar tensor works that depends on what the hook was given")
    if not value.isfinite():
        raise HookError(f"{path} on {responses.names}: {name} is {value.item()}")


def _number(path: str, name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach().double().reshape(())
    except (TypeError, ValueError, RuntimeError):
        raise HookError(f"{path}: metric {name} is {value!r:.80}; a number works") from None


def _token_sum(path: str, name: str, value: Any, responses: Responses) -> Tensor:
    """A metric with an entry for each token, or already the mean over the trained ones, as their sum."""
    single = isinstance(value, Tensor) and value.dim() == 0
    if single or isinstance(value, int | float):
        return _number(path, name, value) * len(responses.places)
    return responses.flat(path, f"metric {name}", value).detach().double().sum()
