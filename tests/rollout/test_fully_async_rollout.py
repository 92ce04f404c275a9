"""The public door, in both eras' styles: outside any actor against a real engine, and as a face of a given worker."""

import asyncio
import io
from argparse import Namespace
from urllib.parse import urlsplit

import pytest

from miles import loops
from miles.data.prompts import PromptSource
from miles.rollout import fully_async_rollout as door
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.types import Sample, iter_samples
from tests.real_engine import MODEL, serving
from tests.virtual import settings_of

FLAGS = (
    f"--fully-async --hf-checkpoint {MODEL} --rm-type exact_match --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--rollout-max-response-len 8 --rollout-skip-special-tokens"
)


@pytest.fixture(scope="module")
def address():
    with serving("--weight-version", "3") as url:
        yield urlsplit(url)


@pytest.fixture
def args(address):
    yield settings_of(FLAGS).namespace(sglang_router_ip=address.hostname, sglang_router_port=address.port)
    door.stop_global_worker()
    loops.stop()


@pytest.fixture
def source():
    rows = MODEL.parent / "prompts.jsonl"
    prompts = PromptSource.from_file(rows, input_key="prompt", label_key="label")
    return RolloutDataSourceWithBuffer(settings_of(FLAGS).namespace(), prompts)


def assert_scored(groups):
    assert len(groups) == 4
    for sample in iter_samples([s for g in groups for s in g]):
        sample.validate()
        assert sample.reward in (0.0, 1.0)
        assert sample.response_length == len(sample.rollout_log_probs) > 0
        assert (sample.weight_versions, sample.submit_version) == (["3"], 3)


@pytest.mark.slow
def test_the_first_era_function_gives_whole_batches_without_losing_a_group(args, source):
    """W1: what one call leaves, the next call gets."""
    first = door.generate_rollout_fully_async(args, 0, source)
    second = door.generate_rollout_fully_async(args, 1, source)
    assert_scored(first)
    assert_scored(second)
    seen = [g[0].group_index for g in first + second]
    assert len(set(seen)) == 8
    assert seen == sorted(seen[:4]) + sorted(seen[4:])


@pytest.mark.slow
def test_the_first_era_worker_runs_outside_any_actor(args, source):
    worker = door.AsyncRolloutWorker(args, source)
    worker.start()
    worker.start()
    assert worker.running and worker.worker_thread.is_alive()
    loops.run(worker.feed.changes.wait_until(lambda: worker.get_queue_size() >= 4))
    completed = worker.get_completed_groups()
    assert_scored([group for _, group in completed][:4])
    assert len({number for number, _ in completed}) == len(completed)
    worker.stop()
    worker.stop()
    assert not worker.running


@pytest.mark.slow
def test_the_global_worker_is_one_and_can_be_stopped_twice(args, source):
    worker = door.get_global_worker(args, source)
    assert door.get_global_worker(args, source) is worker
    door.stop_global_worker()
    door.stop_global_worker()
    assert door.get_global_worker(args, source) is not worker


@pytest.mark.slow
def test_todays_class_gives_a_batch_at_the_version_of_its_step(args, source):
    function = door.FullyAsyncRolloutFn(RolloutFnConstructorInput(args, source))
    output = asyncio.run(function(RolloutFnTrainInput(0, weight_version=3)))
    assert_scored(output.samples)


def test_evaluation_is_refused():
    with pytest.raises(ValueError, match="--eval-interval"):
        door.generate_rollout_fully_async(Namespace(), 0, None, evaluation=True)
    with pytest.raises(ValueError, match="--eval-interval"):
        asyncio.run(door.FullyAsyncRolloutFn(RolloutFnConstructorInput(Namespace(), None))(RolloutFnEvalInput(0)))


@pytest.mark.parametrize(
    ("versions", "oldest"), [([["3", "5"], ["4"]], 3), ([["default"], ["7"]], 7), ([[], ["default"]], None)]
)
def test_the_oldest_version_of_a_group(versions, oldest):
    assert door.group_oldest_weight_version([Sample(weight_versions=v) for v in versions]) == oldest


def test_a_cached_version_never_makes_a_sample_look_younger(monkeypatch):
    """S6: look-up cached for 1 s, update 0.1 s later: stamping may use the old answer, judging asks again."""
    now, served = [0.0], ["1"]
    monkeypatch.setattr(door.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        door.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(f'{{"weight_version": "{served[0]}"}}'.encode())
    )
    cached, args = door._CachedWeightVersion(ttl=1.0), Namespace(sglang_router_ip="h", sglang_router_port=1)
    assert cached.get(args) == 1
    now[0], served[0] = 0.1, "2"
    stamped = cached.get(args)
    judged_at = cached.get(args, fresh=True)
    assert (stamped, judged_at) == (1, 2)
    now[0], served[0] = 1.3, "default"
    assert cached.get(args) is None
