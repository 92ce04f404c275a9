"""The ring's order of things, and when it does what."""

import asyncio

import pytest

from miles.driver.ring import Ring, Schedule
from miles.sim import clock
from miles.types import Weights


def schedule(**changes):
    values = dict(
        start=0, total=4, version=0, publish_interval=1, eval_interval=None, eval_before=True, save_interval=None
    )
    return Schedule(**(values | changes))


class Log:
    """Both sides, the checkpoints and the watcher: writes down who was called."""

    def __init__(self):
        self.calls, self.due, self.steps, self.evals = [], [], {}, {}

    async def take_batch(self, step):
        self.calls.append(f"take {step}")
        await asyncio.sleep(2)
        return f"batch {step}", {"rollout/raw_reward": 1.0}

    async def train(self, data, step):
        self.calls.append(f"train {data}")
        await asyncio.sleep(3)
        return {"train/loss": 0.5}

    async def commit(self):
        self.calls.append("commit")

    async def busy_weights(self):
        return frozenset()

    async def write_weights(self, version, busy):
        return Weights(version, "shm", "path")

    async def publish(self, weights, steps_due):
        self.calls.append(f"publish {weights.version}")
        self.due.append(steps_due)
        await asyncio.sleep(1)

    async def covered(self, step):
        pass

    async def evaluate(self, step):
        self.calls.append("evaluate")
        return {"eval/x": 0.25}

    async def save(self, step, folder):
        self.calls.append(f"save {folder}")

    def asked_for(self):
        return False

    def begin(self, step):
        return f"folder-{step}"

    def finish(self, step, version):
        self.calls.append(f"visible {step} at {version}")

    def step(self, step, metrics):
        self.steps[step] = metrics

    def evaluation(self, step, metrics):
        self.evals[step] = metrics

    def doing(self, state):
        pass


def turn(**changes):
    log = Log()
    clock.run(Ring(schedule(**changes), log, log, log, log).run())
    return log


def test_weights_go_out_as_soon_as_the_step_ends():
    assert turn(total=2).calls == [
        "publish 1", "take 0", "train batch 0", "commit", "publish 2",
        "take 1", "train batch 1", "commit", "publish 3", "save folder-1", "visible 1 at 3",
    ]  # fmt: skip


def test_publication_keeps_its_interval_and_the_last_step_always_publishes():
    log = turn(total=5, publish_interval=2)
    after = [log.calls[i - 2] for i, call in enumerate(log.calls) if call.startswith("publish") and i]
    assert after == ["train batch 1", "train batch 3", "train batch 4"]


def test_a_publication_tells_how_many_steps_it_is_for():
    """After a resume in the middle of an interval, and at the end, fewer steps are due than the interval has."""
    assert turn(total=8, publish_interval=3).due == [3, 3, 2, 0]
    assert turn(start=4, total=8, version=2, publish_interval=3).due == [2, 2, 0]


def test_evaluations_run_at_the_start_every_interval_and_at_the_end():
    assert list(turn(total=5, eval_interval=2).evals) == [0, 2, 4, 5]
    assert list(turn(total=4, eval_interval=2, eval_before=False).evals) == [2, 4]
    assert list(turn(total=4, eval_interval=10, start=2, version=2).evals) == [4]


def test_an_evaluation_names_the_version_it_is_of():
    log = turn(total=2, eval_interval=1)
    assert [m["eval/weight_version"] for m in log.evals.values()] == [1, 2, 3]


def test_checkpoints_become_visible_after_everything_is_written():
    calls = turn(total=4, save_interval=2).calls
    assert [c for c in calls if "folder" in c or "visible" in c] == [
        "save folder-1", "visible 1 at 3", "save folder-3", "visible 3 at 5",
    ]  # fmt: skip


def test_a_resumed_ring_publishes_the_checkpoints_version_again_and_goes_on():
    log = turn(start=2, total=4, version=2)
    assert log.calls[:2] == ["publish 3", "take 2"]
    assert list(log.steps) == [2, 3]


def test_times_add_up_to_the_step():
    metrics = turn(total=1).steps[0]
    assert metrics["perf/train_wait_time"] == pytest.approx(2)
    assert metrics["perf/train_time"] == pytest.approx(3)
    assert metrics["perf/update_weights_time"] == pytest.approx(1)
    assert metrics["perf/step_time"] == pytest.approx(6)


def test_a_checkpoint_that_was_asked_for_is_written_after_the_step(monkeypatch):
    asked = iter([False, True, False, False])
    monkeypatch.setattr(Log, "asked_for", lambda self: next(asked))
    calls = turn(total=4).calls
    assert [c for c in calls if "visible" in c] == ["visible 1 at 3", "visible 3 at 5"]


def test_a_run_with_nothing_to_save_saves_nothing():
    assert not any(schedule(saves=False, save_interval=1).saves_after(step) for step in range(4))
    assert all(schedule(save_interval=1).saves_after(step) for step in range(4))
