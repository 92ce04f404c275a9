"""New weights from a disk abort what runs only on request, as SGLang's endpoint does."""

import asyncio

import httpx
import pytest

from miles.engine.local.application import Application
from miles.engine.local.server import EngineOptions, open_service


@pytest.mark.parametrize(("aborts", "reason", "tokens"), [(False, "length", 5), (True, "abort", 0)])
def test_new_weights_abort_nothing_unless_asked(folder, aborts, reason, tokens):
    body = {"input_ids": [5, 9, 2], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    update = {"model_path": str(folder), "weight_version": "2", "abort_all_requests": aborts}

    async def main():
        service = open_service(EngineOptions(folder, dtype="float32"))
        transport = httpx.ASGITransport(Application(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            await client.post("/pause_generation", json={"mode": "in_place"})
            request = asyncio.create_task(client.post("/generate", json=body))
            while await service.between_steps(lambda: service.engine.waiting) == 0:
                pass
            assert (await client.post("/update_weights_from_disk", json=update)).status_code == 200
            await client.post("/continue_generation")
            reply = (await request).json()["meta_info"]
        service.thread.stop()
        assert await asyncio.to_thread(service.thread.wait_stopped, 30)
        return reply

    meta = asyncio.run(main())
    assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == (reason, tokens)
