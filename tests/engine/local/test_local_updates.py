"""New weights over HTTP: all or nothing, label and weights together, and no former weights left in memory."""

import asyncio
import weakref
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.local.served import message, served, spans
from tests.engine.local.test_local_loading import write_segment


def is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


@served
async def test_refused_update_leaves_old_weights_and_version_serving(server, other_folder, tmp_path):
    before = (await server.generate(20)).json()["output_ids"]
    tensors = load_file(other_folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors")
    for path, body in (
        ("/update_weights_from_disk", {"model_path": str(tmp_path)}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")}),
        ("/update_weights_from_shared_memory", {"path": str(tmp_path / "nowhere.bin")}),
        ("/update_weights_from_shared_memory", {"path": str(write_segment(tmp_path, tensors))}),
    ):
        reply = await server.post(path, **body, weight_version="2")
        assert reply.status_code == 400 and str(tmp_path) in message(reply)
        assert await server.version() == "default"
        assert (await server.generate(20)).json()["output_ids"] == before
    assert "model.norm.weight has shape [5], Qwen3ForCausalLM needs [48]" in message(reply)


@served
async def test_update_sets_weights_and_label_together_and_drops_the_former_segment(server, other_folder, tmp_path):
    before = (await server.generate(20)).json()["output_ids"]
    first = weakref.ref(server.service.engine._model)
    paths = []
    for version in ("1", "2", "3"):
        folder = tmp_path / version
        folder.mkdir()
        paths.append(write_segment(folder, load_file(other_folder / "model.safetensors")))
        reply = await server.post("/update_weights_from_shared_memory", path=str(paths[-1]), weight_version=version)
        assert reply.json() == {"success": True, "weight_version": version}
        assert [is_mapped(path) for path in paths] == [False] * (len(paths) - 1) + [True]
        assert await server.version() == version
    assert first() is None, "the weights of the start are still in memory"
    after = await server.generate(20)
    assert after.json()["output_ids"] != before
    assert spans(after) == [("3", 0, 20)]


@served
async def test_update_from_disk_without_a_label_keeps_the_label(server, other_folder):
    before = (await server.generate(20)).json()["output_ids"]
    reply = await server.post("/update_weights_from_disk", model_path=str(other_folder), load_format=None)
    assert reply.json() == {"success": True, "weight_version": "default"}
    assert (await server.generate(20)).json()["output_ids"] != before


@served
async def test_nan_weights_give_500_and_the_server_lives_until_good_ones_heal_it(server, folder, tmp_path):
    before = (await server.generate(20)).json()["output_ids"]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    await server.post("/update_weights_from_disk", model_path=str(tmp_path), weight_version="2")
    for reply in await asyncio.gather(*[server.generate(20) for _ in range(3)]):
        assert reply.status_code == 500 and "not finite" in message(reply) and "'2'" in message(reply)
    assert (await server.client.get("/health")).status_code == 200
    assert (await server.client.get("/health_generate")).status_code == 500
    await server.post("/update_weights_from_disk", model_path=str(folder), weight_version="3")
    assert (await server.generate(20)).json()["output_ids"] == before
