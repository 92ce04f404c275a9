"""vLLM: settings and a port in, the way to start its server out; SGLang's protocol in, vLLM's out, and back.

    /generate                   POST /v1/completions with token ids, asking for token ids and log-probs
    /model_info                 GET  /weight_info (404: the label is unknown)
    /pause_generation           POST /pause: retract is keep with the caches cleared, in_place is keep with them kept
    /continue_generation        POST /resume
    /abort_request              POST /abort_requests
    /flush_cache                POST /reset_prefix_cache
    /update_weights_from_disk   POST /collective_rpc reload_weights, then POST /update_weight_version

Everything else goes through as it is. vLLM doesn't tell which weights sampled a token, so the version at submit counts. The
control endpoints are there only with VLLM_SERVER_DEV_MODE=1. A server whose ``/pause`` doesn't know ``mode`` yet aborts what
runs at each update: `miles.engine.conformance` finds that out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from miles.config import Settings
from miles.engine.launch import Launch, interpreter
from miles.engine.wire import Reply, Transport

ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
PAUSE = {
    "abort": {"mode": "abort", "clear_cache": "true"},
    "retract": {"mode": "keep", "clear_cache": "true"},
    "in_place": {"mode": "keep", "clear_cache": "false"},
}
RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Sent when the caller leaves them out: else vLLM samples by the model's own ``generation_config.json``."""
SAME = {*NEUTRAL, "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"}
READ = {"rid", "input_ids", "sampling_params", "return_logprob"}


def launch(settings: Settings, *, model: str, port: int, extra: Sequence[str] = ()) -> Launch:
    """Serves ``model`` on 127.0.0.1:``port``; ``extra`` are more arguments, which win over those before them.

    Log-probs are those of the distribution that was sampled from, temperature included, as SGLang's are.
    """
    sampling, engine = settings.sampling, settings.engine
    argv = [
        interpreter(engine), "-m", "vllm.entrypoints.cli.main", "serve", model,
        "--host", "127.0.0.1",
        "--port", str(port),
        "--tensor-parallel-size", str(engine.rollout_num_gpus_per_engine),
        "--dtype", settings.model.dtype,
        "--seed", str(settings.data.rollout_seed),
        "--max-num-seqs", str(engine.sglang_max_running_requests),
        "--logprobs-mode", "processed_logprobs",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    if sampling.rollout_max_context_len is not None:
        argv += ["--max-model-len", str(sampling.rollout_max_context_len)]
    return Launch((*argv, *extra), ENV)


class VllmTransport:
    """A `Transport` that takes SGLang's requests and serves them by vLLM servers."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._ways = {
            "/generate": self._generate,
            "/model_info": self._model_info,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
        }

    async def request(self, method: str, url: str, payload: Any = None) -> Reply:
        path = urlsplit(url).path
        way = self._ways.get(path)
        if way is None:
            return await self._inner.request(method, url, payload)
        return await way(url.removesuffix(path), payload or {})

    async def close(self) -> None:
        await self._inner.close()

    async def _post(self, url: str, payload: Any = None) -> Reply:
        return await self._inner.request("POST", url, payload)

    async def _generate(self, server: str, payload: dict[str, Any]) -> Reply:
        try:
            body = completion_request(payload)
        except ValueError as error:
            return Reply(400, {"error": str(error)})
        reply = await self._post(f"{server}/v1/completions", body)
        return Reply(200, generate_reply(reply.body, payload.get("rid"))) if reply.status == 200 else reply

    async def _model_info(self, server: str, _: dict[str, Any]) -> Reply:
        reply = await self._inner.request("GET", f"{server}/weight_info")
        return Reply(200, {"weight_version": "default"}) if reply.status == 404 else reply

    async def _pause(self, server: str, payload: dict[str, Any]) -> Reply:
        return await self._post(f"{server}/pause?{urlencode(PAUSE[payload.get('mode', 'abort')])}")

    async def _continue(self, server: str, _: dict[str, Any]) -> Reply:
        return await self._post(f"{server}/resume")

    async def _abort(self, server: str, payload: dict[str, Any]) -> Reply:
        """vLLM knows the one prompt of the completion ``rid`` as ``cmpl-rid-0``; no ids are all of them."""
        ids = {} if payload.get("abort_all") else {"request_ids": [f"cmpl-{payload['rid']}-0"]}
        return await self._post(f"{server}/abort_requests", ids)

    async def _flush(self, server: str, _: dict[str, Any]) -> Reply:
        return await self._post(f"{server}/reset_prefix_cache")

    async def _update(self, server: str, payload: dict[str, Any]) -> Reply:
        """The label follows the weights, never precedes them; a server without labels is asked for none.

        A load that fails may leave some layers new and some old: nothing that runs goes on with those.
        """
        kwargs = {"weights_path": payload["model_path"]}
        loaded = await self._post(f"{server}/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        if loaded.status != 200:
            await self._post(f"{server}/abort_requests", {})
            return loaded
        version = payload.get("weight_version")
        if version is not None:
            labelled = await self._post(f"{server}/update_weight_version", {"new_version": version})
            if labelled.status not in (200, 404):
                return labelled
        return Reply(200, {"success": True, "weight_version": version})


def completion_request(payload: dict[str, Any]) -> dict[str, Any]:
    """The body for ``/v1/completions`` from one for ``/generate``. Raises ValueError for what vLLM can't do."""
    for name in payload.keys() - READ:
        if payload[name]:
            raise ValueError(f"{name} is not supported by the vllm backend")
    body: dict[str, Any] = {"max_tokens": None} | NEUTRAL
    for name, value in payload["sampling_params"].items():
        if name not in RENAMED and name not in SAME:
            known = ", ".join(sorted([*RENAMED, *SAME]))
            raise ValueError(f"sampling_params.{name} is not supported by the vllm backend; these are: {known}")
        if value is not None:
            body[RENAMED.get(name, name)] = value
    identity = {} if payload.get("rid") is None else {"request_id": payload["rid"]}
    return body | identity | {"prompt": payload["input_ids"], "logprobs": 0, "return_token_ids": True}


def generate_reply(body: Any, rid: str | None) -> Any:
    """The reply to ``/generate`` from one of ``/v1/completions``; what is no such reply stays as it is."""
    if not isinstance(body, dict) or not body.get("choices"):
        return body
    choice, usage = body["choices"][0], body.get("usage") or {}
    ids = choice.get("token_ids") or []
    log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return {
        "text": choice.get("text"),
        "output_ids": ids,
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": choice.get("finish_reason") or "stop", "matched": choice.get("stop_reason")},
            "prompt_tokens": usage.get("prompt_tokens", 0),
            "completion_tokens": usage.get("completion_tokens", len(ids)),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            "output_token_logprobs": [
                [math.nan if p is None else p, i, None] for p, i in zip(log_probs, ids, strict=False)
            ],
        },
    }
