"""The HTTP surface, on the ASGI application itself: what clients send, what they get, and what it does to the rest."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest

from miles.engine.local import dialect
from miles.engine.local.application import Application
from miles.engine.local.server import EngineOptions, _serve, open_service
from miles.errors import SettingsError
from tests.engine.local.served import GREEDY, PROMPT, message, reason, served, serving, spans
from tests.engine.local.tiny import VOCAB


@served
async def test_reply_has_the_shape_of_sglang(server):
    body = (await server.generate(4, rid="mine")).json()
    meta = body["meta_info"]
    assert set(body) == {"text", "output_ids", "meta_info"}
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    assert (meta["weight_version"], meta["weight_versions"]) == (
        "default",
        [{"version": "default", "start": 0, "end": 4}],
    )
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in body["output_ids"]]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["e2e_latency"] >= 0
    assert body["text"] == " ".join(f"w{i}" for i in body["output_ids"])


@served
async def test_log_probs_are_sent_only_when_asked_for_and_ids_always(server):
    body = (await server.post("/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 3})).json()
    assert "output_token_logprobs" not in body["meta_info"]
    assert len(body["output_ids"]) == 3


@served
async def test_text_prompts_are_the_same_as_their_ids(server):
    text = await server.post("/generate", text="w5 w9 w2", sampling_params=GREEDY | {"max_new_tokens": 6})
    assert text.json()["output_ids"] == (await server.generate(6)).json()["output_ids"]


@served
async def test_many_requests_at_once_get_each_what_they_get_alone(server):
    seeds = range(24)
    alone = [await server.generate(9, temperature=1, sampling_seed=s, prompt=[s, 3]) for s in seeds]
    together = await asyncio.gather(
        *[server.generate(9, temperature=1, sampling_seed=s, prompt=[s, 3]) for s in reversed(seeds)]
    )
    assert [r.json()["output_ids"] for r in reversed(together)] == [r.json()["output_ids"] for r in alone]


@served
async def test_wrong_requests_get_400_with_a_reason_and_cost_nothing(server):
    broken = await server.client.post("/generate", content=b'{"input_ids": [1')
    assert broken.status_code == 400 and "not valid JSON" in message(broken)
    too_long = await server.generate(500, prompt=[1] * 100)
    assert too_long.status_code == 400
    assert "100 tokens and max_new_tokens is 500" in message(too_long) and "context of 512" in message(too_long)
    unknown = await server.generate(5, temprature=1)
    assert unknown.status_code == 400 and "temprature is unknown" in message(unknown)
    outside = await server.generate(5, prompt=[VOCAB])
    assert outside.status_code == 400 and f"input_ids holds {VOCAB}" in message(outside)
    assert (await server.generate(5)).status_code == 200


@served
async def test_wrong_control_calls_get_400_with_the_field(server):
    cases = [
        ("/pause_generation", {"mode": "softly"}, "mode"),
        ("/pause_generation", {"node": "abort"}, "node"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"abort_all": "perhaps"}, "abort_all"),
        ("/update_weight_version", {}, "new_version"),
        ("/update_weights_from_disk", {"weight_version": "2"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "gguf"}, "load_format 'gguf'"),
        ("/update_weights_from_shared_memory", {"path": "/x"}, "weight_version"),
    ]
    for path, body, said in cases:
        reply = await server.post(path, **body)
        assert reply.status_code == 400 and said in message(reply), (path, reply.text)
    assert (await server.client.get("/generate")).status_code == 404
    assert (await server.client.get("/nowhere")).status_code == 404
    assert (await server.post("/health")).status_code == 405


@served
async def test_health_and_descriptions(server, folder):
    for path in ("/health", "/health_generate"):
        assert (await server.client.get(path)).status_code == 200
    for path in ("/server_info", "/get_server_info"):
        info = (await server.client.get(path)).json()
        assert info["weight_version"] == "default" and info["context_length"] == 512 and info["vocab_size"] == VOCAB
    for path in ("/model_info", "/get_model_info"):
        info = (await server.client.get(path)).json()
        assert info["weight_version"] == "default" and info["model_path"] == str(folder)
    assert (await server.client.get("/get_weight_version")).json() == {"weight_version": "default"}


@served
async def test_health_answers_while_generation_is_paused(server):
    await server.post("/pause_generation", mode="retract")
    assert (await server.client.get("/server_info")).json()["is_paused"] is True
    assert (await server.client.get("/health_generate")).status_code == 200


@served
async def test_in_place_update_over_http_has_exact_spans(server, other_folder):
    frozen = await server.frozen(server.generate(9), server.generate(9, prompt=[7]))
    update = await server.post("/update_weights_from_disk", model_path=str(other_folder), weight_version="2")
    assert update.status_code == 200
    assert not any(task.done() for task in frozen)
    await server.post("/continue_generation")
    for reply in await asyncio.gather(*frozen):
        assert spans(reply) == [("default", 0, 3), ("2", 3, 9)]
        assert reply.json()["meta_info"]["weight_version"] == "2"


@served
async def test_retract_and_update_over_http_loses_no_request(server, other_folder):
    tasks = await server.frozen(*[server.generate(9, prompt=[i]) for i in range(5)])
    await server.post("/pause_generation", mode="retract")
    info = (await server.client.get("/server_info")).json()
    assert (info["num_running_reqs"], info["num_queue_reqs"]) == (0, 5)
    assert (await server.post("/flush_cache")).status_code == 200
    await server.post("/update_weights_from_disk", model_path=str(other_folder), weight_version="2")
    await server.post("/continue_generation")
    for reply in await asyncio.gather(*tasks):
        assert reason(reply) == "length"
        assert spans(reply) == [("default", 0, 3), ("2", 3, 9)]


@served
async def test_abort_pause_returns_partial_tokens_and_later_requests_wait(server):
    (running,) = await server.frozen(server.generate(9))
    await server.post("/pause_generation")
    reply = await running
    assert reason(reply) == "abort"
    meta = reply.json()["meta_info"]
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == len(reply.json()["output_ids"]) == 3
    later = asyncio.create_task(server.generate(2))
    await server.wait_waiting(1)
    await server.post("/continue_generation")
    assert reason(await later) == "length"


@served
async def test_request_aborted_before_it_started_has_empty_arrays(server):
    await server.post("/pause_generation", mode="in_place")
    waiting = asyncio.create_task(server.generate(5, rid="w"))
    await server.wait_waiting(1)
    assert (await server.post("/abort_request", rid="w")).json() == {"aborted": 1}
    body = (await waiting).json()
    assert (body["text"], body["output_ids"], body["meta_info"]["output_token_logprobs"]) == ("", [], [])
    assert body["meta_info"]["weight_versions"] == []
    assert body["meta_info"]["finish_reason"]["type"] == "abort"


@served
async def test_request_aborted_while_retracted_has_the_tokens_it_had(server):
    (task,) = await server.frozen(server.generate(9))
    await server.post("/pause_generation", mode="retract")
    await server.post("/abort_request", abort_all=True)
    body = (await task).json()
    assert len(body["output_ids"]) == len(body["meta_info"]["output_token_logprobs"]) == 3
    assert body["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]


@served
async def test_abort_by_id_ends_that_request_only(server):
    one, other = await server.frozen(server.generate(9, rid="one"), server.generate(9, rid="other"))
    assert (await server.post("/abort_request", rid="one")).json() == {"aborted": 1}
    assert (await server.post("/abort_request", rid="one")).json() == {"aborted": 0}
    assert reason(await one) == "abort"
    await server.post("/continue_generation")
    assert reason(await other) == "length"


@served
async def test_abort_all_ends_everything(server):
    tasks = await server.frozen(*[server.generate(9) for _ in range(4)])
    assert (await server.post("/abort_request", abort_all=True)).json() == {"aborted": 4}
    assert [reason(r) for r in await asyncio.gather(*tasks)] == ["abort"] * 4


@served
async def test_flush_is_refused_while_requests_run(server):
    (task,) = await server.frozen(server.generate(9))
    refused = await server.post("/flush_cache")
    assert refused.status_code == 400 and "1 requests are running" in message(refused)
    await server.post("/continue_generation")
    await task
    assert (await server.client.get("/flush_cache")).status_code == 200


@served
async def test_label_update_aborts_nothing_unless_asked(server):
    tasks = await server.frozen(server.generate(9), server.generate(9))
    await server.post("/update_weight_version", new_version="5")
    await server.post("/continue_generation")
    replies = await asyncio.gather(*tasks)
    assert [reason(r) for r in replies] == ["length"] * 2
    assert [s[0] for s in spans(replies[0])] == ["default", "5"]
    tasks = await server.frozen(server.generate(9), server.generate(9))
    await server.post("/update_weight_version", new_version="6", abort_all_requests=True)
    assert [reason(r) for r in await asyncio.gather(*tasks)] == ["abort"] * 2
    assert await server.version() == "6"


@served
async def test_client_that_disconnects_frees_its_slot(server):
    body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}).encode()
    messages: asyncio.Queue = asyncio.Queue()
    sent = []

    async def send(message):
        sent.append(message)

    messages.put_nowait({"type": "http.request", "body": body[:20], "more_body": True})
    messages.put_nowait({"type": "http.request", "body": body[20:], "more_body": False})
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    (call,) = await server.frozen(server.app(scope, messages.get, send))
    assert server.service.engine.running == 1
    messages.put_nowait({"type": "http.disconnect"})
    await call
    assert await server.service.between_steps(lambda: server.service.engine.running) == 0
    assert sent == []


@served
async def test_client_that_disconnects_before_its_body_is_complete_costs_nothing(server):
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    await server.app({"type": "http", "method": "POST", "path": "/generate", "headers": []}, receive, send)
    assert sent == []
    assert (await server.generate(2)).status_code == 200


@served
async def test_stopping_ends_running_requests_with_what_they_have(server):
    tasks = await server.frozen(*[server.generate(9) for _ in range(3)])
    server.service.thread.stop()
    for reply in await asyncio.gather(*tasks):
        assert reply.status_code == 200 and reason(reply) == "abort"
        assert spans(reply) == [("default", 0, 3)]
    assert await asyncio.to_thread(server.service.thread.wait_stopped, 30)
    assert (await server.client.get("/health")).status_code == 503
    refused = await server.generate(3)
    assert refused.status_code == 503 and "shutting down" in message(refused)


def test_requests_without_a_seed_differ_among_each_other_and_repeat_with_the_engines_seed(folder):
    async def sampled(seed):
        async with serving(folder, seed=seed) as server:
            replies = [await server.generate(8, temperature=1) for _ in range(4)]
            return [tuple(r.json()["output_ids"]) for r in replies]

    first, again, other = asyncio.run(sampled(3)), asyncio.run(sampled(3)), asyncio.run(sampled(4))
    assert first == again != other
    assert len(set(first)) == 4


def test_more_requests_than_slots_all_get_their_reply(folder):
    async def main():
        async with serving(folder, max_running_requests=4, max_total_tokens=600) as server:
            replies = await asyncio.gather(*[server.generate(10 + i, prompt=[i % VOCAB] * (i + 1)) for i in range(40)])
            return [r.json()["meta_info"]["completion_tokens"] for r in replies]

    assert asyncio.run(main()) == [10 + i for i in range(40)]


def test_version_label_of_the_options_is_served(folder):
    async def main():
        async with serving(folder, weight_version="17") as server:
            return await server.version(), spans(await server.generate(2))

    assert asyncio.run(main()) == ("17", [("17", 0, 2)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context_length": 4096}, "--context-length 4096 is more than the model's 512 positions"),
        (
            {"context_length": 400, "max_total_tokens": 300},
            "--context-length 400 does not fit into a KV cache of 300 tokens",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_numbers(folder, options, said):
    with pytest.raises(SettingsError, match=said):
        open_service(EngineOptions(folder, **options))


def test_with_an_api_key_nothing_but_health_answers_without_it(folder):
    async def main():
        async with serving(folder) as server:
            app = Application(server.service, api_key="secret")
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
                for key in (None, "Bearer wrong", "secret"):
                    headers = {} if key is None else {"Authorization": key}
                    for path in ("/generate", "/pause_generation", "/update_weight_version"):
                        assert (await client.post(path, json=body, headers=headers)).status_code == 401
                    assert (await client.get("/health", headers=headers)).status_code == 200
                assert not server.service.engine.paused
                right = {"Authorization": "Bearer secret"}
                assert (await client.post("/generate", json=body, headers=right)).status_code == 200
                assert (await client.get("/model_info", headers=right)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "some.host"])
def test_an_address_that_others_reach_needs_an_api_key(folder, host):
    with pytest.raises(SettingsError, match=f"--host {host} can be reached by others and needs an --api-key"):
        asyncio.run(_serve(EngineOptions(folder, host=host), None))


@served
async def test_health_of_generation_ends_when_a_pause_lands_in_it(server):
    engine = server.service.engine
    await server.service.between_steps(lambda: engine.pause("in_place"))  # so that its token is still to come
    health = asyncio.create_task(server.client.get("/health_generate"))
    await server.wait_waiting(1)
    await server.post("/pause_generation", mode="in_place")
    assert (await health).status_code == 200
    await server.wait_waiting(0)


@served
async def test_metrics_have_sglangs_names_and_count_what_runs(server):
    async def metrics():
        reply = await server.client.get("/metrics")
        lines = [line for line in reply.text.splitlines() if not line.startswith("#")]
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines}

    tasks = await server.frozen(server.generate(9), server.generate(9), tokens=3)
    running = await metrics()
    held = 2 * (len(PROMPT) + 3)
    assert running["sglang:num_running_reqs"] == 2 and running["sglang:num_queue_reqs"] == 0
    assert running["sglang:generation_tokens_total"] == 6 and running["sglang:gen_throughput"] > 0
    total = server.service.description["max_total_num_tokens"]
    assert running["sglang:token_usage"] == pytest.approx(held / total)
    await server.post("/continue_generation")
    await asyncio.gather(*tasks)
    idle = await metrics()
    assert idle["sglang:num_running_reqs"] == idle["sglang:token_usage"] == 0
    assert idle["sglang:generation_tokens_total"] == 18
    assert idle["sglang:prompt_tokens_total"] == 2 * len(PROMPT)
    assert "sglang:cache_hit_rate" in idle


@served
async def test_the_schema_has_every_path_and_the_fields_of_generate(server):
    paths = (await server.client.get("/openapi.json")).json()["paths"]
    fields = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(fields) == set(dialect.FIELDS)
    documented = (Path(__file__).parents[3] / "docs" / "reference" / "engine-http.md").read_text()
    told = set(re.findall(r"^\| `(?:GET |POST )?(/[a-z_]+)`", documented, re.MULTILINE))
    assert told == set(paths)
