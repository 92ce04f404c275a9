"""New weights while requests run: spans exact to the token in every mode, and nothing is sampled by the wrong ones."""

import random

import pytest
import torch

from miles.engine.local.model import Model
from miles.engine.local.model_config import ModelConfig
from miles.engine.local.weights import load_folder
from tests.engine.local.tiny import (
    Reference,
    drain,
    load_model,
    make_engine,
    random_prompt,
    request,
    spans,
    steps,
    worst_difference,
)


@pytest.fixture(scope="module")
def other_reference(other_folder):
    return Reference(other_folder)


def per_version(sequence, references):
    """Largest difference of the log-probs of each span to a full forward by the weights of its version."""
    prompt, ours = len(sequence.prompt_ids), torch.tensor(sequence.log_probs).double()
    worst = []
    for version, start, end in spans(sequence):
        table = references[version].log_probs(sequence.prompt_ids + sequence.output_ids)
        ids = torch.tensor(sequence.output_ids[start:end])
        exact = table[prompt - 1 + start : prompt - 1 + end].gather(1, ids[:, None])[:, 0]
        worst.append(float((exact - ours[start:end]).abs().max()))
    return worst


def three_running(folder):
    engine = make_engine(folder)
    engine.set_version("1")
    rng = random.Random(0)
    for i in range(3):
        engine.submit(request(random_prompt(rng, 10 + i), 20, seed=i))
    return engine


def test_update_without_pause_splits_the_span_between_two_steps(folder, other_folder):
    engine = three_running(folder)
    steps(engine, 5)
    engine.adopt(load_model(other_folder), "2")
    engine.submit(request([1, 2, 3], 20, seed=9))
    ended = {s.rid: s for s in drain(engine)}
    for i in range(3):
        assert spans(ended[f"r{i}"]) == [("1", 0, 5), ("2", 5, 20)]
        assert ended[f"r{i}"].weight_version == "2"
    assert spans(ended["r9"]) == [("2", 0, 20)]


def test_retracted_requests_go_on_with_the_new_weights_over_all_their_tokens(folder, other_folder, other_reference):
    references = {"1": Reference(folder), "2": other_reference}
    engine = three_running(folder)
    steps(engine, 7)
    engine.pause("retract")
    engine.adopt(load_model(other_folder), "2")
    engine.resume()
    for sequence in drain(engine):
        assert spans(sequence) == [("1", 0, 7), ("2", 7, 20)]
        assert max(per_version(sequence, references)) < 1e-4


def test_in_place_requests_go_on_from_their_old_keys_and_values(folder, other_folder, other_reference):
    """The first token after the update is not what a full forward by the new weights says: its past is the old one's."""
    references = {"1": Reference(folder), "2": other_reference}
    engine = three_running(folder)
    steps(engine, 7)
    engine.pause("in_place")
    assert (engine.may_step, engine.running) == (False, 3)
    engine.adopt(load_model(other_folder), "2")
    engine.resume()
    for sequence in drain(engine):
        assert spans(sequence) == [("1", 0, 7), ("2", 7, 20)]
        old, new = per_version(sequence, references)
        assert old < 1e-4 and new > 1e-2


def test_pausing_in_place_without_an_update_changes_nothing(folder, reference):
    engine = three_running(folder)
    for _ in range(4):
        steps(engine, 3)
        engine.pause("in_place")
        engine.resume()
    ended = drain(engine)
    assert all(spans(s) == [("1", 0, 20)] for s in ended)
    assert worst_difference(reference, ended) < 1e-4


def test_abort_returns_the_partial_tokens_and_nothing_for_what_never_started(folder):
    engine = make_engine(folder, rows=2)
    for i in range(3):
        engine.submit(request([1, 2, 3], 20, seed=i))
    steps(engine, 4)
    engine.pause("abort")
    ended = {s.rid: s for s in engine.take_ended()}
    assert {s.finish_reason["type"] for s in ended.values()} == {"abort"}
    assert [len(ended[f"r{i}"].output_ids) for i in range(3)] == [4, 4, 0]
    assert [len(ended[f"r{i}"].log_probs) for i in range(3)] == [4, 4, 0]
    assert [spans(ended[f"r{i}"]) for i in range(3)] == [[("default", 0, 4)], [("default", 0, 4)], []]
    assert (engine.running, engine.waiting) == (0, 0)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_requests_that_come_during_a_pause_wait_for_its_end(folder, mode):
    engine = make_engine(folder)
    engine.pause(mode)
    engine.submit(request([1, 2, 3], 3))
    assert not engine.may_step
    engine.resume()
    assert [len(s.output_ids) for s in drain(engine)] == [3]


def test_label_change_alone_aborts_nothing_and_starts_a_span(folder):
    engine = three_running(folder)
    steps(engine, 5)
    engine.set_version("2")
    engine.set_version("3")
    ended = drain(engine)
    assert all(spans(s) == [("1", 0, 5), ("3", 5, 20)] for s in ended)


def test_the_same_label_again_starts_no_span(folder):
    engine = three_running(folder)
    steps(engine, 5)
    engine.set_version("1")
    assert all(spans(s) == [("1", 0, 20)] for s in drain(engine))


def test_labels_under_which_nothing_was_sampled_leave_no_span(folder):
    engine = three_running(folder)
    steps(engine, 5)
    engine.set_version("2")
    engine.set_version("1")
    steps(engine, 3)
    engine.set_version("4")
    engine.pause("abort")
    ended = engine.take_ended()
    assert [spans(s) for s in ended] == [[("1", 0, 8)]] * 3
    assert {s.weight_version for s in ended} == {"4"}


def test_several_updates_while_waiting_leave_no_empty_span(folder, other_folder):
    engine = three_running(folder)
    steps(engine, 4)
    engine.pause("retract")
    for version in ("2", "3", "4"):
        engine.adopt(load_model(other_folder), version)
    engine.resume()
    assert all(spans(s) == [("1", 0, 4), ("4", 4, 20)] for s in drain(engine))


def test_a_request_sent_back_for_lack_of_memory_keeps_exact_spans(folder, other_folder):
    engine = make_engine(folder, tokens=256)
    for i in range(2):
        engine.submit(request([1 + i] * 110, 60, seed=i))
    steps(engine, 30)
    assert (engine.running, engine.waiting) == (1, 1)
    engine.set_version("2")
    ended = {s.rid: spans(s) for s in drain(engine)}
    assert ended == {"r0": [("default", 0, 30), ("2", 30, 60)], "r1": [("default", 0, 19), ("2", 19, 60)]}


def test_aborting_one_request_leaves_the_others_as_they_were(folder):
    def sampled(aborts):
        engine = three_running(folder)
        steps(engine, 4)
        if aborts:
            assert engine.abort(lambda s: s.rid == "r0", "test") == 1
            assert engine.abort(lambda s: s.rid == "nobody", "test") == 0
        return {s.rid: (s.output_ids, s.log_probs) for s in drain(engine)}

    with_abort, without = sampled(True), sampled(False)
    assert len(with_abort["r0"][0]) == 4
    assert [with_abort[r][0] for r in ("r1", "r2")] == [without[r][0] for r in ("r1", "r2")]


def test_nan_weights_end_requests_with_an_error_and_good_ones_heal_the_engine(folder, reference):
    engine = three_running(folder)
    steps(engine, 3)
    config = ModelConfig.read(folder)
    weights = load_folder(folder, config, torch.float32)
    weights["model.layers.1.mlp.down_proj.weight"].fill_(torch.nan)
    engine.adopt(Model(config, weights), "2")
    failed = drain(engine)
    assert len(failed) == 3
    for sequence in failed:
        assert "not finite" in sequence.failure and "response token 3" in sequence.failure and "'2'" in sequence.failure
    engine.adopt(load_model(folder), "3")
    for i in range(5):
        engine.submit(request([i + 1] * (i + 1), 10, seed=i))
    healed = drain(engine)
    assert [s.failure for s in healed] == [None] * 5
    assert worst_difference(reference, healed) < 1e-4


def test_a_failing_step_ends_its_requests_with_the_cause_and_the_engine_lives(folder, reference):
    class Broken:
        def forward(self, *_):
            raise RuntimeError("matrices of 3 and 4")

    engine = three_running(folder)
    steps(engine, 2)
    engine.adopt(Broken(), None)
    engine.step()
    assert all("RuntimeError: matrices of 3 and 4" in s.failure for s in engine.take_ended())
    assert engine.running == 0
    engine.adopt(load_model(folder), None)
    engine.submit(request([5, 6, 7], 10))
    assert worst_difference(reference, drain(engine)) < 1e-4
