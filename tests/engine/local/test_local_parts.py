"""Weights that arrive in parts: from a process group or in request bodies, served only once they are whole."""

import asyncio
import base64
import contextlib
import pickle
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save

from tests.engine.local.served import message, served, spans


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_pickle(tensors):
    return base64.b64encode(pickle.dumps(list(tensors.items()))).decode()


def as_safetensors(tensors):
    return base64.b64encode(save(tensors)).decode()


def halves(folder):
    items = sorted(load_file(folder / "model.safetensors").items())
    return dict(items[::2]), dict(items[1::2])


async def tokens(server):
    return (await server.generate(20)).json()["output_ids"]


async def tokens_of(server, folder):
    """What the weights of ``folder`` say; the server serves them from here on."""
    await server.post("/update_weights_from_disk", model_path=str(folder))
    return await tokens(server)


@served
async def test_tensors_in_a_body_are_a_whole_update(server, folder, other_folder):
    expected = await tokens_of(server, other_folder)
    tensors = load_file(other_folder / "model.safetensors")
    for version, (form, sent) in enumerate(
        [(None, as_pickle(tensors)), ("safetensors", as_safetensors(tensors)), (None, [as_pickle(tensors)])]
    ):
        await server.post("/update_weights_from_disk", model_path=str(folder))
        reply = await server.post(
            "/update_weights_from_tensor", serialized_named_tensors=sent, load_format=form, flush_cache=True,
            weight_version=str(version),
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        assert await server.version() == str(version)
        assert await tokens(server) == expected


@served
async def test_parts_serve_only_after_the_end_and_so_does_their_label(server, other_folder):
    before = await tokens(server)
    await server.post("/begin_weight_update")
    for part in halves(other_folder):
        reply = await server.post(
            "/update_weights_from_tensor", serialized_named_tensors=as_pickle(part), weight_version="7"
        )
        assert reply.status_code == 200
        assert (await tokens(server), await server.version()) == (before, "default")
    await server.post("/update_weight_version", new_version="8")
    assert await server.version() == "default"
    assert (await server.post("/end_weight_update")).json() == {"success": True, "weight_version": "8"}
    after = await server.generate(20)
    assert spans(after) == [("8", 0, 20)]
    assert after.json()["output_ids"] == await tokens_of(server, other_folder) != before


@served
async def test_half_of_the_weights_never_serves(server, other_folder):
    before = await tokens(server)
    one, two = (as_pickle(half) for half in halves(other_folder))
    alone = await server.post("/update_weights_from_tensor", serialized_named_tensors=one, weight_version="2")
    assert alone.status_code == 400 and "17 of 35 tensors have not arrived (model.layers.0.self_attn.k_proj" in message(
        alone
    )
    await server.post("/begin_weight_update")
    await server.post("/update_weights_from_tensor", serialized_named_tensors=one, weight_version="2")
    assert "have not arrived" in message(await server.post("/end_weight_update"))
    assert "no update was begun" in message(await server.post("/end_weight_update"))
    await server.post("/begin_weight_update")
    await server.post("/update_weights_from_tensor", serialized_named_tensors=one, weight_version="2")
    await server.post("/begin_weight_update")
    await server.post("/update_weights_from_tensor", serialized_named_tensors=two, weight_version="2")
    assert "have not arrived" in message(await server.post("/end_weight_update")), "what a former update left counts"
    assert (await tokens(server), await server.version()) == (before, "default")


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


@served
async def test_bodies_that_are_no_tensors_are_refused_and_nothing_in_them_runs(server):
    before = await tokens(server)
    for sent, said in (
        ("%%%", "can't be read"),
        (base64.b64encode(b"no pickle").decode(), "can't be read"),
        (base64.b64encode(pickle.dumps([("a", Evil())])).decode(), "it holds builtins.exec; tensors by value"),
        (base64.b64encode(pickle.dumps([1, 2])).decode(), "is no list of (name, tensor)"),
        (as_pickle({"a": 5}), "a is no tensor"),
        (as_pickle({"model.norm.weight": torch.ones(5)}), "model.norm.weight has shape [5]"),
        (as_pickle({"model.norm.weight": torch.ones(48).int()}), "model.norm.weight [48] has dtype int32"),
        (as_pickle({"what": torch.ones(5)}), "what is unknown"),
        ([as_pickle({}), as_pickle({})], "has 2 entries"),
    ):
        reply = await server.post("/update_weights_from_tensor", serialized_named_tensors=sent, weight_version="2")
        assert reply.status_code == 400 and said in message(reply), reply.text
    assert (await tokens(server), await server.version()) == (before, "default")


SENDER = """
import sys
from pathlib import Path
from miles.engine.weight_group import WeightGroup
from tests.engine.local.test_local_parts import halves
group = WeightGroup(
    address="127.0.0.1", port=int(sys.argv[1]), rank=0, world_size=2, name="w", backend="gloo", timeout_s=60
)
for part in halves(Path(sys.argv[2])):
    sys.stdin.readline()
    group.broadcast(list(part.values()))
sys.stdin.readline()
"""


@contextlib.asynccontextmanager
async def joined(server, folder):
    """Group "w" of the server and a trainer of another process, which broadcasts a half of ``folder`` for each line."""
    port = free_port()
    command = [sys.executable, "-c", SENDER, str(port), str(folder)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)  # noqa: ASYNC220 (started once, at once)
    try:
        at = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "rank_offset": 1}
        reply = await server.post("/init_weights_update_group", **at, group_name="w", backend="gloo")
        assert reply.status_code == 200, reply.text
        yield sender
    finally:
        sender.kill()
        sender.wait()
        sender.stdin.close()


def described(tensors):
    return {
        "names": list(tensors),
        "dtypes": [str(t.dtype) for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


@pytest.mark.slow
@served
async def test_buckets_of_a_process_group_arrive_while_requests_run(server, other_folder):
    async with joined(server, other_folder) as sender:
        (task,) = await server.frozen(server.generate(9))
        await server.post("/begin_weight_update")
        for part in halves(other_folder):
            sender.stdin.write(b"\n")
            reply = await server.post(
                "/update_weights_from_distributed", **described(part), group_name="w", weight_version="3"
            )
            assert reply.status_code == 200, reply.text
        assert (await server.post("/end_weight_update")).status_code == 200
        await server.post("/continue_generation")
        assert spans(await task) == [("default", 0, 3), ("3", 3, 9)]
        assert await tokens(server) == await tokens_of(server, other_folder)
        assert (await server.post("/destroy_weights_update_group", group_name="w")).status_code == 200
        assert "is unknown" in message(await server.post("/destroy_weights_update_group", group_name="w"))


@pytest.mark.slow
@served
async def test_a_sender_that_dies_costs_an_error_and_the_old_weights_serve(server, other_folder):
    before = await tokens(server)
    async with joined(server, other_folder) as sender:
        await server.post("/begin_weight_update")
        part, _ = halves(other_folder)
        update = asyncio.create_task(
            server.post("/update_weights_from_distributed", **described(part), group_name="w", weight_version="3")
        )
        sender.kill()
        reply = await update
        assert reply.status_code == 500 and "a broadcast failed" in message(reply)
    assert (await tokens(server), await server.version()) == (before, "default")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}, "1 names, 0 dtypes"),
        (
            "/update_weights_from_distributed",
            {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[9]]},
            "model.norm.weight has shape [9]",
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[48]], "group_name": "x"},
            "group 'x' is unknown",
        ),
        (
            "/init_weights_update_group",
            {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 2, "backend": "gloo"},
            "rank_offset 2 is no rank of a group of 2",
        ),
        (
            "/init_weights_update_group",
            {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "nccl"},
            "backend 'nccl' is not supported",
        ),
    ],
)
def test_wrong_buckets_and_groups_are_refused_before_anybody_waits(folder, other_folder, tmp_path, path, body, said):
    @served
    async def check(server):
        reply = await server.post(path, **body)
        assert reply.status_code == 400 and said in message(reply), reply.text

    check(folder, other_folder, tmp_path)
