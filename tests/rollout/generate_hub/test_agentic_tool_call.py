"""The client of the session protocol, against a small server of it: what was recorded comes back as samples."""

import asyncio
import json
from argparse import Namespace

import numpy as np
import pytest
from aiohttp import ClientSession, web
from safetensors.numpy import save

from miles.config import Problems, Settings
from miles.errors import EngineFailed, EngineRefused, HookError
from miles.hooks import function_registry
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.check import check
from miles.rollout.generate_hub import agentic_tool_call
from miles.rollout.generate_hub.session_client import META
from miles.types import Sample, VersionSpan

PARAMS = {
    "temperature": 0.5,
    "max_new_tokens": 9,
    "sampling_seed": 3,
    "stop": None,
    "spaces_between_special_tokens": False,
}


def wire(*samples, reason=None):
    """The body of a samples reply."""
    tensors, fields = {}, []
    for at, sample in enumerate(samples):
        fields.append({k: v for k, v in sample.items() if not isinstance(v, np.ndarray)})
        tensors |= {f"{k}.{at}": v for k, v in sample.items() if isinstance(v, np.ndarray)}
    meta = json.dumps({"samples": fields, "session_metadata": {}, "empty_reason": reason}).encode()
    return save({**tensors, META: np.frombuffer(meta, np.uint8)})


def recorded(mask, versions, **more):
    length = len(mask)
    return {
        "tokens": np.arange(2 + length, dtype=np.int64), "response": "said", "response_length": length,
        "loss_mask": np.array(mask, np.uint8), "rollout_log_probs": np.array([-0.5 * m for m in mask], np.float64),
        "status": "completed", "weight_versions": versions, "metadata": {"turns": 2}, "reward": None,
        "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 2},
    } | more  # fmt: skip


class Server:
    """The endpoints that the client uses; ``calls`` are what it did, in order."""

    def __init__(self, body, status=200):
        self.body, self.status, self.calls = body, status, []
        self.unavailable = 0

    async def answer(self, request):
        payload = await request.json() if request.can_read_body else None
        self.calls.append((request.method, request.path, payload))
        if self.unavailable:
            self.unavailable -= 1
            return web.Response(status=503)
        if request.path == "/health":
            return web.json_response({"status": "ok", "session_server_instance_id": "start-1"})
        if request.method == "DELETE":
            return web.Response(status=204)
        if request.path == "/sessions":
            return web.json_response({"session_id": "s1"})
        if request.path.endswith("/samples"):
            return web.Response(body=self.body, status=self.status)
        return web.json_response({"choices": []})


async def agent(base_url, prompt, request_kwargs, metadata):
    async with (
        ClientSession() as http,
        http.post(base_url + "/v1/chat/completions", json={"messages": prompt}) as reply,
    ):
        await reply.read()
    agent.told = (request_kwargs, metadata)
    return {"reward": 1.0, "agent_metrics": {"total_tool_time": 2.5}}


def run(server, function=agent, sample=None):
    """What the generate function makes of a sample."""

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            args = Namespace(
                session_server_ip="127.0.0.1", session_server_port=[port], max_seq_len=64,
                custom_agent_function_path="user.run",
            )  # fmt: skip
            given = sample or Sample(index=5, prompt=[{"role": "user", "content": "hi"}], metadata={"task": "t"})
            given.submit_version = 3
            with function_registry.temporary("user.run", function):
                return (await agentic_tool_call.generate(GenerateFnInput(Namespace(args=args), given, PARAMS))).samples
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_a_session_is_opened_used_read_out_and_closed():
    server = Server(wire(recorded([1, 1, 0, 1], ["4", "5"])))
    sample = run(server)
    assert [call[:2] for call in server.calls] == [
        ("GET", "/health"), ("POST", "/sessions"), ("POST", "/sessions/s1/v1/chat/completions"),
        ("POST", "/sessions/s1/samples"), ("DELETE", "/sessions/s1"),
    ]  # fmt: skip
    assert server.calls[3][2]["max_seq_len"] == 64 and server.calls[3][2]["metadata"]["reward"] == 1.0
    sample.validate()
    assert (sample.index, sample.submit_version, sample.status) == (5, 3, Sample.Status.COMPLETED)
    assert (sample.tokens, sample.loss_mask) == ([0, 1, 2, 3, 4, 5], [1, 1, 0, 1])
    assert sample.version_spans == [VersionSpan(4, 0, 2), VersionSpan(5, 3, 4)]
    assert sample.metadata == {"task": "t", "turns": 2, "reward": 1.0, "agent_metrics": {"total_tool_time": 2.5}}
    assert (sample.non_generation_time, sample.prefix_cache_info.cached_tokens) == (2.5, 1)
    kwargs, told = agent.told
    assert kwargs == {"temperature": 0.5, "max_tokens": 9, "seed": 3}
    assert told["session_server_instance_id"] == "start-1" and told["max_seq_len"] == 64 and told["task"] == "t"


def test_branches_are_compact_siblings_of_one_rollout():
    samples = run(Server(wire(recorded([1, 1], ["4"]), recorded([1], ["4"], status="truncated"))))
    assert [s.rollout_id for s in samples] == [5, 5]
    assert [s.status for s in samples] == [Sample.Status.COMPLETED, Sample.Status.TRUNCATED]


def test_versions_that_fit_no_turns_stay_labels():
    sample = run(Server(wire(recorded([1, 1, 0, 1], ["4"]))))
    assert (sample.version_spans, sample.weight_versions, sample.oldest_version) == ([], ["4"], 3)


@pytest.mark.parametrize("reason", ["no_records", "all_truncated"])
def test_a_session_without_records_is_aborted(reason):
    sample = run(Server(wire(reason=reason)))
    assert (sample.status, sample.index, sample.response_length) == (Sample.Status.ABORTED, 5, 0)


def test_a_server_that_is_busy_is_asked_again_and_a_refusal_is_not():
    server = Server(wire(recorded([1], ["4"])))
    server.unavailable = 2
    assert run(server).status is Sample.Status.COMPLETED
    refusing = Server(b"assembly failed", status=422)
    with pytest.raises(EngineRefused, match="422: assembly failed"):
        run(refusing)
    assert refusing.calls[-1][0] == "DELETE"
    assert [c[1] for c in refusing.calls].count("/sessions/s1/samples") == 1


@pytest.mark.parametrize("body", [b"no safetensors", wire(recorded([1, 1], ["4"], response_length=5))])
def test_samples_that_cannot_be_used_are_the_servers_failure(body):
    with pytest.raises(EngineFailed, match="unusable samples of a session"):
        run(Server(body))


def test_an_agent_that_fails_is_named_and_its_session_closed():
    async def broken(base_url, prompt, request_kwargs, metadata):
        raise KeyError("tool")

    server = Server(b"")
    with pytest.raises(
        HookError, match=r"user.run failed on sample 5: KeyError: 'tool' \(.*test_agentic_tool_call.py:\d+"
    ):
        run(server, broken)
    assert server.calls[-1][0] == "DELETE"


def test_settings_are_checked_at_start():
    problems = Problems()
    words = "--fully-async --rollout-batch-size 2 --rollout-max-response-len 8 --use-session-server "
    words += "--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate"
    check(Settings.parse(words.split(), problems), problems)
    said = "\n".join(problems.lines)
    assert "--custom-agent-function-path is not set: nothing runs the agent" in said
    assert "--session-server-ip is not set" in said and "--session-server-port is not set" in said
