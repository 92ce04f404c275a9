"""Where a response ends. The tokenizer is word-level: token i is the text "wi", and decoding joins with spaces."""

import json

import pytest

from miles.engine.local.dialect import Dialect, Request
from miles.engine.local.sampling_params import SamplingParams
from miles.engine.local.text import Text
from tests.engine.local.tiny import EOS, VOCAB, drain, make_engine


@pytest.fixture(scope="module")
def greedy(folders, references):
    """What greedy decoding says after [5, 9, 2]: the reference of every test here."""
    return references["qwen3"].greedy([5, 9, 2], 30)


@pytest.fixture
def ended(folder):
    dialect = Dialect(Text(folder), VOCAB, 512, frozenset({EOS}))

    def run(**params):
        sampling = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_new_tokens": 30} | params)
        sequence = dialect.sequence(Request("r", [5, 9, 2], None, sampling, True), [5, 9, 2], 0)
        engine = make_engine(folder)
        engine.submit(sequence)
        drain(engine)
        return sequence, text_of(dialect, sequence)

    return run


def first_with_a_new_token(greedy, at_least):
    """The first position from ``at_least`` on whose token has not been there before."""
    return next(i for i in range(at_least, 30) if greedy[i] not in greedy[:i])


def text_of(dialect, sequence):
    return json.loads(dialect.reply(sequence, False, 0.0))["text"]


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def test_length_ends_a_response(ended, greedy):
    sequence, text = ended(max_new_tokens=7)
    assert sequence.finish_reason == {"type": "length", "length": 7}
    assert (sequence.output_ids, text) == (greedy[:7], words(greedy[:7]))


def test_stop_token_ends_a_response_which_keeps_its_id_but_not_its_text(ended, greedy):
    at = first_with_a_new_token(greedy, 2)
    sequence, text = ended(stop_token_ids=(greedy[at],))
    assert sequence.finish_reason == {"type": "stop", "matched": greedy[at]}
    assert (sequence.output_ids, text) == (greedy[: at + 1], words(greedy[:at]))
    assert len(sequence.log_probs) == at + 1
    assert ended(stop_token_ids=(greedy[at],), no_stop_trim=True)[1] == words(greedy[: at + 1])


def test_stop_on_the_last_allowed_token_is_a_stop(ended, greedy):
    at = first_with_a_new_token(greedy, 2)
    sequence, _ = ended(stop_token_ids=(greedy[at],), max_new_tokens=at + 1)
    assert sequence.finish_reason["type"] == "stop"


def test_stop_text_may_span_tokens_and_is_cut_off_the_text(ended, greedy):
    at = first_with_a_new_token(greedy, 3)
    stop = f"{greedy[at - 1]} w{greedy[at]}"
    sequence, text = ended(stop=("never", stop))
    assert sequence.finish_reason == {"type": "stop", "matched": stop}
    assert sequence.output_ids == greedy[: at + 1]
    assert text == words(greedy[: at + 1]).partition(stop)[0]
    assert ended(stop=(stop,), no_stop_trim=True)[1] == words(greedy[: at + 1])


def test_eos_ends_a_response_unless_it_is_ignored(folder, greedy):
    at = first_with_a_new_token(greedy, 2)
    dialect = Dialect(Text(folder), VOCAB, 512, frozenset({greedy[at]}))
    lengths = []
    for ignore in (False, True):
        params = SamplingParams(temperature=0, ignore_eos=ignore, max_new_tokens=30)
        sequence = dialect.sequence(Request("r", [5, 9, 2], None, params, True), [5, 9, 2], 0)
        engine = make_engine(folder)
        engine.submit(sequence)
        drain(engine)
        lengths.append(len(sequence.output_ids))
    assert lengths == [at + 1, 30]


def test_stop_tokens_still_end_a_response_that_ignores_eos(ended, greedy):
    at = first_with_a_new_token(greedy, 2)
    assert len(ended(ignore_eos=True, stop_token_ids=(greedy[at],))[0].output_ids) == at + 1


def test_no_stop_counts_before_min_new_tokens(ended, greedy):
    at = first_with_a_new_token(greedy, 2)
    sequence, _ = ended(stop_token_ids=(greedy[at],), min_new_tokens=at + 5, max_new_tokens=at + 5)
    assert len(sequence.output_ids) == at + 5
    assert greedy[at] not in sequence.output_ids[: at + 4]
    sequence, _ = ended(stop=(f"w{greedy[at]}",), min_new_tokens=at + 3)
    assert len(sequence.output_ids) >= at + 3


def test_special_tokens_are_left_out_of_the_text_unless_asked(folder, ended, greedy):
    dialect = Dialect(Text(folder), VOCAB, 512, frozenset())
    assert dialect.text.decode([3, EOS, 4], skip_special_tokens=True) == "w3 w4"
    assert dialect.text.decode([3, EOS, 4], skip_special_tokens=False) == f"w3 w{EOS} w4"


def test_stop_text_that_is_a_special_token_is_found_though_the_text_leaves_it_out(folder):
    dialect = Dialect(Text(folder), VOCAB, 512, frozenset())
    params = SamplingParams(stop=(f"w{EOS}",), max_new_tokens=30)
    sequence = dialect.sequence(Request("r", [5], None, params, True), [5], 0)
    for token in (3, 4, EOS):
        sequence.append(token, -1.0)
    sequence.finish_reason = sequence.reached_end(dialect.text.decode)
    assert sequence.finish_reason == {"type": "stop", "matched": f"w{EOS}"}
    assert text_of(dialect, sequence) == "w3 w4"
