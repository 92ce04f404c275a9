"""Who runs and who waits, and what becomes of the cache under them."""

import random

import pytest
import torch

from miles.engine.local.engine import Engine
from miles.engine.local.kv_cache import WIDTH_STEP, KVCache
from miles.engine.local.model_config import ModelConfig
from miles.engine.local.text import Text
from tests.engine.local.tiny import (
    drain,
    load_model,
    make_engine,
    make_scheduler,
    random_prompt,
    request,
    steps,
    worst_difference,
)


def test_no_more_requests_run_than_there_are_rows(folder):
    engine = make_engine(folder, rows=3)
    for i in range(8):
        engine.submit(request([1, 2], 6, seed=i))
    most = 0
    while engine.may_step:
        engine.step()
        most = max(most, engine.running)
    assert most == 3
    assert len(engine.take_ended()) == 8


def test_kv_memory_is_bounded_and_whoever_waits_runs_in_the_end(folder, reference):
    """Four rows of 128 tokens: as the requests outgrow them, the newest go back and are computed again."""
    rng = random.Random(0)
    scheduler = make_scheduler(folder, tokens=4 * WIDTH_STEP, rows=16)
    engine = Engine(load_model(folder), scheduler, Text(folder).decode)
    for i in range(6):
        engine.submit(request(random_prompt(rng, 100), 60 if i % 2 else 20, seed=i))
    held, most_rows = [], 0
    while engine.may_step:
        engine.step()
        most_rows = max(most_rows, engine.running)
        held.append(sum(s.length for s in scheduler.running))
    ended = engine.take_ended()
    assert max(held) <= 4 * WIDTH_STEP
    assert most_rows == 4
    assert sorted(len(s.output_ids) for s in ended) == [20, 20, 20, 60, 60, 60]
    assert worst_difference(reference, ended) < 1e-4


def test_one_request_may_fill_the_whole_cache(folder, reference):
    engine = make_engine(folder, tokens=200, rows=4)
    engine.submit(request([7] * 150, 50))
    engine.submit(request([8] * 10, 5, seed=1))
    ended = drain(engine)
    assert [s.length for s in ended] == [200, 15]
    assert worst_difference(reference, ended) < 1e-4


def test_rows_get_narrow_again_so_that_a_long_request_does_not_cost_the_others_their_rows(folder, reference):
    """A row of 384 leaves two rows of the cache; once that request is gone, eight short ones run at a time again."""
    engine = make_engine(folder, tokens=8 * WIDTH_STEP, rows=16)
    engine.submit(request([1] * 300, 3))
    for i in range(1, 12):
        engine.submit(request([i] * 10, 12, seed=i))
    steps(engine, 3)
    assert (engine.running, engine.waiting) == (1, 10)
    engine.step()
    assert (engine.running, engine.waiting) == (8, 3)
    assert worst_difference(reference, drain(engine)) < 1e-4


def test_requests_join_in_the_order_in_which_they_came(folder):
    engine = make_engine(folder, rows=1)
    for i in range(5):
        engine.submit(request([1, 2], 2, seed=i))
    assert [s.rid for s in drain(engine)] == [f"r{i}" for i in range(5)]


def test_a_long_request_at_the_front_is_not_overtaken_for_ever(folder):
    engine = make_engine(folder, tokens=4 * WIDTH_STEP, rows=16)
    for i in range(4):
        engine.submit(request([1] * 10, 10, seed=i))
    engine.step()
    engine.submit(request([2] * 400, 2, seed=50))
    for i in range(5, 9):
        engine.submit(request([1] * 10, 10, seed=i))
    order = [s.rid for s in drain(engine)]
    assert order.index("r50") == 4


def test_tokens_that_join_in_one_step_are_bounded_and_a_longer_request_joins_in_parts(folder):
    engine = make_engine(folder, prefill_tokens=20)
    for i, length in enumerate((8, 8, 8, 90, 3)):
        engine.submit(request([1] * length, 9, seed=i))
    running = []
    for _ in range(8):
        engine.step()
        running.append(engine.running)
    assert running == [2, 3, 4, 4, 4, 4, 5, 5]


def test_retracted_requests_wait_in_the_order_in_which_they_came_and_before_the_rest(folder):
    """The first one leaves early, so that the last one stands in its row; the rows are not the order."""
    scheduler = make_scheduler(folder, rows=4)
    engine = Engine(load_model(folder), scheduler, Text(folder).decode)
    for i in range(5):
        engine.submit(request([1, 2, 3], 1 if i == 0 else 6, seed=i))
    engine.step()
    assert [s.rid for s in scheduler.running] == ["r3", "r1", "r2"]
    engine.pause("retract")
    assert [s.rid for s in scheduler.waiting] == ["r1", "r2", "r3", "r4"]


@pytest.mark.parametrize("width_of_longest", [1, 128, 129, 500])
def test_cut_rows_keep_what_they_hold(folder, width_of_longest):
    cache = KVCache(ModelConfig.read(folder), torch.float32, max_total_tokens=1024, max_rows=8)
    cache.fit(2, 100, 0)
    keys, values = cache.layer(1)
    keys[:2, :, :100] = torch.rand(2, *keys.shape[1:2], 100, keys.shape[3])
    values[:2, :, :100] = -keys[:2, :, :100]
    before = keys[:2, :, :100].clone()
    cache.fit(2, width_of_longest, 2)
    keys, values = cache.layer(1)
    assert keys.shape[2] >= width_of_longest
    assert torch.equal(keys[:2, :, :100], before)
    assert torch.equal(values[:2, :, :100], -before)


def test_cache_takes_no_memory_before_it_is_used(folder):
    """8 GiB are reserved; pages come as rows are written."""
    config = ModelConfig.read(folder)
    tokens = 2**33 // (config.kv_values_per_token * 4)
    before = _resident_bytes()
    cache = KVCache(config, torch.float32, tokens, 4)
    cache.fit(1, 100, 0)
    assert _resident_bytes() - before < 2**26
    assert cache.rows_for(100) == 4


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
