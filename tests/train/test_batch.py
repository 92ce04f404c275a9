"""Columns become checked samples: whole groups per step, exact positions, clear errors."""

import numpy as np
import pytest
import torch

from miles.config.owners import TrainSettings
from miles.errors import TrainerError
from miles.train.batch import collate, fill_up, read_batch, split_groups
from tests.train.tiny import VOCABULARY, make_batch, reference_advantages, select

CPU = torch.device("cpu")


def row(**changes):
    """One sample: prompt 5 6, response 7 8 9 with the middle token masked."""
    values = {
        "tokens": np.array([5, 6, 7, 8, 9], np.int32), "response_lengths": 3,
        "loss_masks": np.array([1, 0, 1], np.uint8), "rollout_log_probs": np.array([-1.0, np.nan, -3.0], np.float32),
        "raw_reward": 1.0, "group_ids": 4, "sample_indices": 77, "rollout_ids": 77, "truncated": 0,
    }  # fmt: skip
    return {name: [value] for name, value in (values | changes).items()}


def join(*batches):
    return {name: [v for batch in batches for v in batch[name]] for name in batches[0]}


def read(batch, steps=1, **train):
    return read_batch(batch, TrainSettings(**train), optimizer_steps=steps, vocabulary=VOCABULARY)


def test_masked_token_is_not_there_whatever_its_log_prob():
    [[sample]] = read(row())
    assert sample.trained.tolist() == [2, 4]
    assert sample.rollout_log_probs.tolist() == [-1.0, -3.0]


def test_what_follows_the_last_trained_token_is_not_read():
    [[sample]] = read(row(loss_masks=np.array([1, 0, 0], np.uint8)))
    assert sample.input_length == 2
    assert collate([sample], packed=False, device=CPU).input_ids.tolist() == [[5, 6]]


@pytest.mark.parametrize("packed", [False, True])
def test_a_loss_of_the_users_predicts_whole_responses(packed):
    """Two samples, prompt 5 6 and response 7 8 9: all of it is predicted, and the middle token isn't trained."""
    [samples] = read(join(row(), row(sample_indices=78, rollout_ids=78)), loss_type="custom_loss")
    micro = collate(samples, packed=packed, device=CPU)
    assert micro.targets.tolist() == [7, 8, 9] * 2
    assert micro.trained.tolist() == [0, 2, 3, 5]
    assert micro.input_ids.flatten()[micro.predicts].tolist() == [6, 7, 8] * 2


def test_weights_are_one_over_the_trained_tokens_times_the_terms_of_the_mean():
    batch = join(row(), row(sample_indices=78, rollout_ids=78, loss_masks=np.array([1, 0, 0], np.uint8)))
    assert [(s.weight, s.terms) for s in read(batch)[0]] == [(1 / (2 * 2), 2), (1 / 2, 2)]
    assert [(s.weight, s.terms) for s in read(batch, calculate_per_token_loss=True)[0]] == [(1 / 3, 3)] * 2


def test_advantages_are_those_of_the_whole_batch_by_group():
    batch = make_batch()
    found = {s.index: s.advantage for step in read(batch, steps=3) for s in step}
    for index, expected in zip(batch["sample_indices"], reference_advantages(batch), strict=True):
        assert found[index] == pytest.approx(expected, abs=1e-9)


def test_groups_stay_whole_however_their_samples_lie():
    assert split_groups([7, 8, 7, 9, 8, 5], 2) == [[0, 2, 1, 4], [3, 5]]


def test_fewer_groups_than_optimizer_steps_are_refused():
    with pytest.raises(TrainerError, match="1 groups in the batch can't make 2 optimizer steps"):
        split_groups([3, 3], 2)


def test_sample_without_trained_tokens_counts_and_is_left_out():
    empty = row(loss_masks=np.zeros(3, np.uint8), sample_indices=78, rollout_ids=78)
    [[sample]] = read(join(row(), empty))
    assert (sample.index, sample.weight) == (77, 1 / (2 * 2))


def test_samples_of_one_rollout_are_one_reward_and_one_term_of_the_loss():
    """Rollout 1 in two pieces (2 trained tokens each) against rollout 2 in one: baselines of two, not of three."""
    pieces = [row(sample_indices=i, rollout_ids=1, raw_reward=1.0) for i in (1, 2)]
    other = row(sample_indices=3, rollout_ids=2, raw_reward=0.0)
    [samples] = read(join(*pieces, other), grpo_std_normalization=False)
    assert [s.advantage for s in samples] == [0.5, 0.5, -0.5]
    assert [s.weight for s in samples] == [1 / (4 * 2), 1 / (4 * 2), 1 / (2 * 2)]


def test_samples_of_one_rollout_must_agree_on_their_reward():
    pieces = [row(sample_indices=i, rollout_ids=1, raw_reward=float(i)) for i in (1, 2)]
    with pytest.raises(TrainerError, match=r"sample 2 has reward 2\.0, another sample of rollout 1 has 1\.0"):
        read(join(*pieces))


def test_rewards_without_normalization_are_the_advantages():
    [samples] = read(join(row(), row(raw_reward=None, sample_indices=78, rollout_ids=78)), rewards_normalization=False)
    assert [s.advantage for s in samples] == [1.0, 0.0]


def test_rewards_of_a_hook_are_the_advantages_of_each_sample():
    """Not normalized, and each piece of a rollout may have its own; what isn't scored isn't trained."""
    pieces = [row(sample_indices=i, rollout_ids=1, raw_reward=float(i), rewards=r) for i, r in ((1, 3.5), (2, -1.0))]
    [samples] = read(join(*pieces, row(rollout_ids=2, rewards=None)))
    assert [s.advantage for s in samples] == [3.5, -1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": float("nan")}, "sample 77: its reward is nan"),
        ({"raw_reward": float("nan")}, "sample 77: its reward is nan"),
        ({"raw_reward": float("inf")}, "sample 77: its reward is inf"),
        ({"rollout_log_probs": np.array([-1.0, -2.0, np.nan])}, "engine's log-prob of response token 2 is nan"),
        ({"rollout_log_probs": np.array([-np.inf, -2.0, -1.0])}, "log-prob of response token 0 is -inf"),
        ({"rollout_log_probs": np.array([-1.0])}, "sample 77 has 1 rollout log-probs entries for 3 response tokens"),
        ({"rollout_log_probs": None}, "sample 77 has no rollout log-probs entries for 3"),
        ({"loss_masks": np.array([1, 1])}, "sample 77 has 2 loss mask entries for 3 response tokens"),
        ({"tokens": np.array([7, 8, 9])}, "sample 77 has no prompt"),
        ({"tokens": np.array([5, 6, 7, 8, 61])}, "sample 77 has a token id that is not within the 61 of the model"),
        ({"tokens": np.array([-1, 6, 7, 8, 9])}, "sample 77 has a token id"),
        ({"tokens": np.array([8, 9])}, "sample 77 has 2 tokens, fewer than its 3 response tokens"),
        ({"loss_masks": np.zeros(3)}, "nothing to train: the loss masks of all 1 samples"),
    ],
)  # fmt: skip
def test_sample_that_cannot_be_trained_is_named(changes, message):
    with pytest.raises(TrainerError, match=message):
        read(row(**changes))


@pytest.mark.parametrize("packed", [False, True])
def test_each_trained_token_is_predicted_from_the_position_before_it(packed):
    [samples] = read(select(make_batch(), [0, 5, 9]))
    micro = collate(samples, packed=packed, device=CPU)
    previous = micro.input_ids.flatten()[micro.predicts]
    expected_previous = np.concatenate([s.tokens[s.trained - 1] for s in samples])
    expected_targets = np.concatenate([s.tokens[s.trained] for s in samples])
    assert previous.tolist() == expected_previous.tolist()
    assert micro.targets.tolist() == expected_targets.tolist()
    assert micro.samples.tolist() == [s.index for s in samples for _ in s.trained]


def test_packed_row_holds_no_padding_and_starts_positions_anew():
    [samples] = read(select(make_batch(), [0, 5, 9]))
    micro = collate(samples, packed=True, device=CPU)
    assert micro.input_ids.shape == (1, sum(s.input_length for s in samples))
    assert micro.position_ids[0].tolist() == [p for s in samples for p in range(s.input_length)]


def test_samples_are_filled_up_with_ones_that_train_nothing():
    [samples] = read(make_batch())
    filled = fill_up(samples[:5], 4)
    assert len(filled) == 8
    assert [len(s.trained) for s in filled[5:]] == [0, 0, 0]
    assert fill_up(samples[:4], 4) == samples[:4]
    assert len(collate(filled[5:], packed=False, device=CPU).targets) == 0
