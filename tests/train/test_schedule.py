"""The learning rate warms up, decays to its floor, and is never 0 by accident."""

import math

import pytest

from miles.config.owners import TrainSettings
from miles.train.schedule import learning_rate


def test_constant_rate_is_the_rate():
    train = TrainSettings(lr=3e-4)
    assert {learning_rate(step, 10, train) for step in range(12)} == {3e-4}


def test_warm_up_rises_in_equal_steps_to_the_full_rate():
    train = TrainSettings(lr=1.0, lr_warmup_iters=4)
    assert [learning_rate(step, 10, train) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_floor_and_stays_there():
    train = TrainSettings(lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_warmup_iters=2)
    assert learning_rate(2, 10, train) == 1.0
    assert learning_rate(6, 10, train) == pytest.approx(0.6)
    assert learning_rate(10, 10, train) == learning_rate(99, 10, train) == pytest.approx(0.2)


def test_cosine_decay_follows_the_cosine():
    train = TrainSettings(lr=1.0, min_lr=0.1, lr_decay_style="cosine")
    assert learning_rate(0, 8, train) == 1.0
    assert learning_rate(2, 8, train) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(8, 8, train) == pytest.approx(0.1)


def test_warm_up_longer_than_the_run_divides_by_nothing():
    train = TrainSettings(lr=1.0, lr_decay_style="linear", lr_warmup_iters=20)
    assert learning_rate(20, 10, train) == 1.0
