"""What a request may say: everything else is refused with the field, the value and what would work."""

import json

import pytest

from miles.engine.local.dialect import DEFAULT_MAX_NEW_TOKENS, Dialect
from miles.engine.local.sampling_params import SamplingParams
from miles.engine.local.text import Text
from miles.errors import EngineRefused
from tests.engine.local.tiny import EOS, VOCAB


@pytest.fixture
def dialect(folder):
    return Dialect(Text(folder), VOCAB, 64, frozenset({EOS}))


def refusal(dialect, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(EngineRefused) as refused:
        request = dialect.parse(raw)
        dialect.sequence(request, request.input_ids or dialect.encode(request), 0)
    return str(refused.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "an object is needed"),
        ({}, "one of input_ids and text"),
        ({"input_ids": [1], "text": "w1"}, "one of input_ids and text"),
        ({"input_ids": []}, "at least 1 is needed"),
        ({"input_ids": [[1, 2]]}, "one list of token ids"),
        ({"input_ids": [1, True]}, "one list of token ids"),
        ({"input_ids": [1, 2.0]}, "one list of token ids"),
        ({"input_ids": "12"}, "one list of token ids"),
        ({"input_ids": [1, VOCAB]}, f"input_ids holds {VOCAB}; the vocabulary is 0 to {VOCAB - 1}"),
        ({"input_ids": [-1]}, "input_ids holds -1"),
        ({"text": 5}, "text is a int; a str is needed"),
        ({"input_ids": [1], "rid": 5}, "rid is a int"),
        ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob is a str"),
        ({"input_ids": [1], "stream": True}, "stream is not supported"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path is not supported here"),
        ({"input_ids": [1], "sampling_params": 5}, "sampling_params is a int; an object is needed"),
        ({"input_ids": [1] * 60, "sampling_params": {"max_new_tokens": 5}}, "60 tokens and max_new_tokens is 5"),
        ({"input_ids": [1] * 60, "sampling_params": {"max_new_tokens": 5}}, "context of 64; at most 4 new tokens fit"),
        ({"input_ids": [1] * 64}, "send a shorter prompt"),
        ({"input_ids": [1] * 5000}, "5000 tokens"),
    ],
)
def test_wrong_requests_are_refused_by_name(dialect, body, said):
    assert said in refusal(dialect, body)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": -0.1}, "sampling_params.temperature is -0.1; a number of at least 0"),
        ({"temperature": "hot"}, "sampling_params.temperature is 'hot'"),
        ({"temperature": True}, "sampling_params.temperature is True"),
        ({"top_p": 0}, "above 0 and up to 1"),
        ({"top_p": 1.01}, "above 0 and up to 1"),
        ({"top_k": 0}, "-1 (off) or a whole number of at least 1"),
        ({"top_k": 1.5}, "sampling_params.top_k is 1.5"),
        ({"min_p": 2}, "from 0 to 1"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, "min_new_tokens 6 is more than max_new_tokens 5"),
        ({"stop": ""}, "a text or a list of texts"),
        ({"stop": [1]}, "a text or a list of texts"),
        ({"stop_token_ids": ["a"]}, "a list of token ids"),
        ({"stop_token_ids": [-4]}, "a list of token ids"),
        ({"ignore_eos": 1}, "true or false"),
        ({"sampling_seed": 2**64}, "64 bits"),
        ({"temprature": 1}, "sampling_params.temprature is unknown; known are max_new_tokens"),
        ({"n": 2}, "sampling_params.n = 2 is not supported; 1 is"),
        ({"repetition_penalty": 0}, "above 0 and up to 2"),
        ({"frequency_penalty": 3}, "a number from -2 to 2"),
        (
            {"min_new_tokens": 4, "max_new_tokens": 4, "stop_token_ids": list(range(VOCAB))},
            "every token of the vocabulary",
        ),
    ],
)
def test_wrong_sampling_parameters_are_refused_by_name(dialect, params, said):
    assert said in refusal(dialect, {"input_ids": [1], "sampling_params": params})


def test_what_launch_scripts_send_is_accepted():
    """The dict that rollout code builds from its flags, with null for what isn't set, and neutral values of the rest."""
    params = SamplingParams.parse(
        {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 9, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
            "sampling_seed": 42, "n": 1, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "regex": None,
        }
    )  # fmt: skip
    assert params == SamplingParams(
        max_new_tokens=9,
        skip_special_tokens=False,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
        sampling_seed=42,
    )


def test_one_stop_may_stand_without_a_list():
    assert SamplingParams.parse({"stop": "a", "stop_token_ids": 5}) == SamplingParams(stop=("a",), stop_token_ids=(5,))


def test_fields_that_ask_for_nothing_are_accepted(dialect):
    request = dialect.parse(b'{"input_ids": [3], "return_routed_experts": false, "image_data": null, "stream": false}')
    assert request.input_ids == [3]


def test_max_new_tokens_left_out_is_the_default_or_what_the_context_leaves(folder):
    for context, expected in ((1000, DEFAULT_MAX_NEW_TOKENS), (30, 27)):
        dialect = Dialect(Text(folder), VOCAB, context, frozenset())
        assert dialect.sequence(dialect.parse(b'{"input_ids": [1, 2, 3]}'), [1, 2, 3], 0).max_new_tokens == expected


def test_text_is_tokenised(dialect):
    assert dialect.encode(dialect.parse(b'{"text": "w5 w9 w2"}')) == [5, 9, 2]


def test_a_folder_without_a_tokenizer_serves_ids_and_refuses_text(tmp_path):
    dialect = Dialect(Text(tmp_path), VOCAB, 64, frozenset())
    assert dialect.sequence(dialect.parse(b'{"input_ids": [1]}'), [1], 0).prompt_ids == [1]
    assert "tokenizer.json does not exist" in refusal(dialect, {"text": "w5"})
    assert "tokenizer.json does not exist" in refusal(dialect, {"input_ids": [1], "sampling_params": {"stop": ["a"]}})


def test_a_seed_of_the_engine_is_used_only_where_the_request_brings_none(dialect):
    plain = dialect.parse(b'{"input_ids": [1]}')
    seeded = dialect.parse(b'{"input_ids": [1], "sampling_params": {"sampling_seed": 0}}')
    assert [dialect.sequence(r, [1], 77).seed for r in (plain, seeded)] == [77, 0]
