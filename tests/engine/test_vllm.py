"""vLLM's dialect: what goes out, what comes back, and what can't be said in it."""

import asyncio
import math

import pytest

from miles.engine.client import EngineClient, parse_generation
from miles.engine.router import RoutingTable
from miles.engine.vllm import VllmTransport, completion_request, generate_reply
from miles.engine.wire import Reply
from miles.errors import EngineFailed, EngineRefused
from miles.types import VersionSpan
from tests.virtual import settings_of

SERVER = "http://vllm:8000"


class Recorder:
    """A transport that notes requests and answers by path (200 and an empty object otherwise)."""

    def __init__(self, **replies):
        self.replies = {"/" + path.replace("__", "/"): reply for path, reply in replies.items()}
        self.calls = []

    async def request(self, method, url, payload=None):
        path = url.removeprefix(SERVER)
        self.calls.append((method, path, payload))
        return self.replies.get(path, Reply(200, {}))

    async def close(self):
        self.calls.append(("closed",))


def ask(recorder, path, payload=None, method="POST"):
    return asyncio.run(VllmTransport(recorder).request(method, SERVER + path, payload))


def completion(ids, log_probs, finish="stop", **more):
    choice = {"text": "t" if ids else "", "token_ids": ids, "logprobs": log_probs, "finish_reason": finish}
    return {"choices": [choice]} | more


def test_the_samplers_own_parameters_arrive_under_vllms_names():
    """Nothing that shapes the distribution is left to the server's defaults."""
    settings = settings_of("--rollout-max-response-len 32 --rollout-temperature 0.8 --rollout-stop-token-ids 5 6")
    payload = {
        "rid": "g1-s0",
        "input_ids": [1, 2],
        "sampling_params": settings.sampling_params() | {"sampling_seed": 9},
        "return_logprob": True,
    }
    assert completion_request(payload) == {
        "request_id": "g1-s0",
        "prompt": [1, 2],
        "max_tokens": 32,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": [5, 6],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "spaces_between_special_tokens": False,
        "seed": 9,
        "logprobs": 0,
        "return_token_ids": True,
    }


def test_no_length_limit_is_said_aloud():
    """Left out, it would be 16 tokens."""
    body = completion_request({"input_ids": [1], "sampling_params": {}})
    assert body["max_tokens"] is None and "request_id" not in body


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"sampling_params": {"regex": "a+"}}, r"sampling_params\.regex is not supported by the vllm backend"),
        ({"sampling_params": {}, "image_data": ["x"]}, "image_data is not supported"),
    ],
)
def test_what_vllm_cannot_do_is_refused_and_never_sent(payload, why):
    recorder = Recorder()

    async def generate():
        table = RoutingTable(engine_wait_s=1)
        table.add_fixed(SERVER)
        await EngineClient(table, VllmTransport(recorder)).post("/generate", {"input_ids": [1], "rid": "r"} | payload)

    with pytest.raises(EngineRefused, match=why):
        asyncio.run(generate())
    assert recorder.calls == []


def test_a_reply_becomes_ids_log_probs_and_the_submit_version():
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}
    body = completion([7, 8], {"token_logprobs": [-0.5, -0.25]}, finish="length", usage=usage)
    generation = parse_generation(generate_reply(body, "r"), submit_version=4)
    assert (generation.ids, generation.log_probs, generation.finish) == ([7, 8], [-0.5, -0.25], "length")
    assert generation.spans == [VersionSpan(4, 0, 2)]
    counts = {k: generation.meta_info[k] for k in ("id", "prompt_tokens", "completion_tokens", "cached_tokens")}
    assert counts == {"id": "r", "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2}


def test_an_aborted_reply_keeps_what_it_has():
    """V2: nothing at all, or the tokens so far."""
    nothing = parse_generation(generate_reply(completion([], None, "abort") | {"usage": None}, "r"), 1)
    some = parse_generation(generate_reply(completion([7], {"token_logprobs": [-1.0]}, "abort"), "r"), 1)
    assert (nothing.ids, nothing.finish) == ([], "abort")
    assert (some.ids, some.log_probs, some.finish) == ([7], [-1.0], "abort")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (completion([7, 8], {"token_logprobs": [-0.5]}), "2 token ids but 1 log-probs"),
        (completion(None, {"token_logprobs": [-0.5]}, usage={"completion_tokens": 1}), "text but no token ids"),
        (completion([7], {"token_logprobs": [None]}), "log-prob nan"),
        ({"error": "?"}, "meta_info"),
    ],
)
def test_a_reply_that_does_not_fit_is_an_error_not_a_guess(body, why):
    with pytest.raises(EngineFailed, match=why):
        parse_generation(generate_reply(body, "r"), 1)


@pytest.mark.parametrize(
    ("mode", "query"),
    [
        ("abort", "mode=abort&clear_cache=true"),
        ("retract", "mode=keep&clear_cache=true"),
        ("in_place", "mode=keep&clear_cache=false"),
    ],
)
def test_pause_modes(mode, query):
    recorder = Recorder()
    ask(recorder, "/pause_generation", {"mode": mode})
    assert recorder.calls == [("POST", f"/pause?{query}", None)]


def test_control_calls_go_to_their_twins_and_the_rest_goes_through():
    recorder = Recorder()
    ask(recorder, "/continue_generation", {})
    ask(recorder, "/flush_cache", {})
    ask(recorder, "/abort_request", {"rid": "a"})
    ask(recorder, "/abort_request", {"abort_all": True})
    ask(recorder, "/v1/chat/completions", {"messages": []})
    assert recorder.calls == [
        ("POST", "/resume", None),
        ("POST", "/reset_prefix_cache", None),
        ("POST", "/abort_requests", {"request_ids": ["cmpl-a-0"]}),
        ("POST", "/abort_requests", {}),
        ("POST", "/v1/chat/completions", {"messages": []}),
    ]


def test_weights_that_did_not_load_get_no_label_and_nothing_goes_on_with_them():
    recorder = Recorder(collective_rpc=Reply(500, {"error": "no such file"}))
    reply = ask(recorder, "/update_weights_from_disk", {"model_path": "/w", "weight_version": "3"})
    assert reply.status == 500
    assert [path for _, path, _ in recorder.calls] == ["/collective_rpc", "/abort_requests"]


@pytest.mark.parametrize(("status", "expected"), [(200, 200), (404, 200), (500, 500)])
def test_a_server_without_labels_takes_weights_and_one_that_fails_at_labels_does_not(status, expected):
    recorder = Recorder(update_weight_version=Reply(status, {}))
    reply = ask(recorder, "/update_weights_from_disk", {"model_path": "/w", "weight_version": "3"})
    assert reply.status == expected


@pytest.mark.parametrize(
    ("reply", "label"), [(Reply(200, {"weight_version": "3"}), "3"), (Reply(404, "Not Found"), "default")]
)
def test_an_unknown_label_is_no_version(reply, label):
    """S7: what it serves counts as unknown, so it is given the newest weights before it is routed to."""
    assert ask(Recorder(weight_info=reply), "/model_info", method="GET").body == {"weight_version": label}


def test_minus_infinity_never_becomes_a_log_prob():
    body = completion([7], {"token_logprobs": [-math.inf]})
    with pytest.raises(EngineFailed, match="log-prob -inf"):
        parse_generation(generate_reply(body, "r"), 1)
