"""What is computed once and used by several requests, and what never is."""

import random

import pytest

from miles.engine.local.attention import StepBatch
from tests.engine.local.tiny import drain, load_model, make_engine, random_prompt, request, steps, worst_difference


@pytest.fixture
def computed(monkeypatch):
    """Tokens of each step, in order."""
    seen = []
    plain = StepBatch.__init__

    def counting(self, sequences, counts, *rest):
        seen.append(sum(counts))
        plain(self, sequences, counts, *rest)

    monkeypatch.setattr(StepBatch, "__init__", counting)
    return seen


def test_samples_of_a_group_compute_their_prompt_once(folder, reference, computed):
    prompt = random_prompt(random.Random(0), 100)
    engine = make_engine(folder)
    for i in range(8):
        engine.submit(request(prompt, 10, seed=i))
    ended = drain(engine)
    assert computed[:2] == [100, 8]
    assert sorted(s.cached_tokens for s in ended) == [0] + [99] * 7
    assert len({tuple(s.output_ids) for s in ended}) == 8
    assert worst_difference(reference, ended) < 1e-4


def test_a_prompt_that_goes_on_from_an_ended_request_computes_only_what_is_new(folder, reference, computed):
    engine = make_engine(folder)
    engine.submit(request(random_prompt(random.Random(1), 60), 20))
    [first] = drain(engine)
    computed.clear()
    longer = first.prompt_ids + first.output_ids + random_prompt(random.Random(2), 15)
    engine.submit(request(longer, 5, seed=1))
    [second] = drain(engine)
    assert (second.cached_tokens, computed[0]) == (79, 16)
    assert worst_difference(reference, [second]) < 1e-4


def test_requests_that_share_only_a_beginning_share_only_that(folders, references, family):
    rng = random.Random(3)
    system = random_prompt(rng, 70)
    engine = make_engine(folders[family], prefill_tokens=90)
    for i in range(12):
        engine.submit(request(system + random_prompt(rng, rng.randrange(1, 60)), rng.randrange(1, 30), seed=i))
    ended = drain(engine)
    assert sum(s.cached_tokens >= 70 for s in ended) == 11
    assert worst_difference(references[family], ended) < 1e-4


@pytest.mark.parametrize("mode", ["in_place", "retract", "ended"])
def test_keys_and_values_of_other_weights_are_never_served(folder, other_folder, mode):
    prompt = random_prompt(random.Random(4), 80)
    engine = make_engine(folder)
    engine.submit(request(prompt, 40, seed=0))
    drain(engine) if mode == "ended" else steps(engine, 5)
    if mode != "ended":
        engine.pause(mode)
    engine.adopt(load_model(other_folder), "2")
    engine.resume()
    engine.submit(request(prompt, 10, seed=1))
    late = next(s for s in drain(engine) if s.rid == "r1")
    fresh = make_engine(other_folder)
    fresh.submit(request(prompt, 10, seed=1))
    [alone] = drain(fresh)
    assert late.cached_tokens == (79 if mode == "retract" else 0)
    assert late.output_ids == alone.output_ids
    assert max(abs(a - b) for a, b in zip(late.log_probs, alone.log_probs, strict=True)) < 1e-4


def test_what_is_kept_of_ended_requests_is_bounded(folder):
    scheduler = (engine := make_engine(folder, prefix_tokens=150))._scheduler
    for i in range(9):
        engine.submit(request(random_prompt(random.Random(i), 50), 4, seed=i))
        drain(engine)
        assert scheduler._prefixes.tokens <= 150
    assert scheduler._prefixes.tokens == 2 * 53
