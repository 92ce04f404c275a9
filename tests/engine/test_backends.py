"""Which server runs, how it is started, and what is said where it can't."""

import asyncio
import sys

import pytest

from miles.config import Problems
from miles.engine import backends
from miles.engine import check as engine_check
from miles.engine.backends import BACKENDS, backend_of, weights_kind, why_not_importable
from miles.engine.launch import Launch, interpreter
from miles.engine.sglang import SglangTransport
from miles.engine.wire import Reply
from tests.server_stub import make_interpreter
from tests.virtual import settings_of


@pytest.fixture(params=[True, False], ids=["gpu", "no-gpu"])
def gpu(request, monkeypatch):
    set_accelerator(monkeypatch, request.param)
    return request.param


def set_accelerator(monkeypatch, there):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(backends, "has_accelerator", lambda: there)
    monkeypatch.setattr(engine_check, "has_accelerator", lambda: there)


def problems_of(flags):
    problems = Problems()
    engine_check.check(settings_of(flags), problems)
    return problems


# ---- which one


@pytest.mark.parametrize("modules", [(), ("sglang",)], ids=["bare", "with-sglang"])
def test_auto_is_sglang_where_it_and_a_gpu_are_there(gpu, modules, tmp_path):
    python = make_interpreter(tmp_path, *modules)
    expected = "sglang" if gpu and modules else "local"
    assert backend_of(settings_of(f"--engine-python {python}").engine).name == expected


def test_what_is_asked_for_is_taken():
    assert {n: backend_of(settings_of(f"--rollout-backend {n}").engine).name for n in BACKENDS} == {
        n: n for n in ("local", "sglang", "vllm")
    }


@pytest.mark.parametrize(("name", "kind"), [("local", "shm"), ("sglang", "disk"), ("vllm", "disk")])
def test_auto_transfer_is_what_suits_the_server(name, kind):
    engine = settings_of(f"--rollout-backend {name}").engine
    assert weights_kind(engine, backend_of(engine)) == kind


def test_transfer_that_is_asked_for_is_taken():
    engine = settings_of("--rollout-backend local --update-weight-transfer-mode disk").engine
    assert weights_kind(engine, backend_of(engine)) == "disk"


def test_a_transfer_that_a_backend_lacks_is_replaced_by_its_best_way_and_says_so():
    mode = "p2p"
    engine = settings_of(f"--rollout-backend local --update-weight-transfer-mode {mode}").engine
    assert weights_kind(engine, backend_of(engine)) == "shm"
    said = problems_of(f"--rollout-backend local --update-weight-transfer-mode {mode}")
    assert not [line for line in said.lines if "transfer-mode" in line]
    [warning] = [line for line in said.warnings if "transfer-mode" in line]
    assert f"{mode} is not here yet" in warning and "through shm" in warning


# ---- how it is started


def test_the_embedded_engine_runs_here_on_one_thread():
    settings = settings_of("--sglang-max-total-tokens 77 --rollout-max-context-len 55 --dtype float32")
    launch = BACKENDS["local"].launch(settings, model="M", port=1, extra=["--seed", "3"])
    assert launch.argv == (
        sys.executable, "-m", "miles.engine.local", "--model-path", "M", "--port", "1", "--dtype", "float32",
        "--threads", "1", "--max-running-requests", "256", "--max-total-tokens", "77", "--context-length", "55",
        "--seed", "3",
    )  # fmt: skip
    assert launch.env["OMP_NUM_THREADS"] == "1"


def test_a_servers_own_flags_reach_it_and_no_other():
    words = "--sglang-mem-fraction-static 0.7 --sglang-enable-metrics --sglang-lora-paths a b --router-policy x"
    passed = settings_of(words).passthrough
    assert BACKENDS["sglang"].passed_on(passed) == [
        "--mem-fraction-static", "0.7", "--enable-metrics", "--lora-paths", "a", "b",
    ]  # fmt: skip
    assert BACKENDS["vllm"].passed_on(passed) == BACKENDS["local"].passed_on(passed) == []


def test_this_interpreter_keeps_its_environment_and_another_sees_none_of_its_packages():
    parent = {
        "PATH": "/usr/bin",
        "PYTHONPATH": "/ours",
        "PYTHONHOME": "/h",
        "VIRTUAL_ENV": "/v",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    own = Launch((sys.executable,)).environ(parent)
    other = Launch(("/env/bin/python",), {"A": "1"}).environ(parent)
    assert own["PYTHONPATH"] == "/ours"
    assert other == {"PATH": "/env/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "3", "A": "1"}


def test_engine_python_is_absolute_and_a_link_stays_a_link(tmp_path, monkeypatch):
    """Resolving it would leave the virtual environment."""
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert interpreter(settings_of("--engine-python ./python").engine) == str(tmp_path / "python")
    assert interpreter(settings_of("").engine) == sys.executable


# ---- what is said where it can't


def test_local_needs_nothing(gpu):
    problems = problems_of("--rollout-backend local")
    assert problems.lines == [] and problems.warnings == []


def test_an_interpreter_without_the_server_is_named(monkeypatch):
    set_accelerator(monkeypatch, True)
    [line] = problems_of(f"--rollout-backend vllm --engine-python {sys.executable}").lines
    assert line.startswith(
        f"--engine-python {sys.executable}: --rollout-backend vllm needs an interpreter that has it, and"
    )
    assert f"{sys.executable} has no module vllm" in line


def test_an_interpreter_that_is_not_there_is_named(monkeypatch):
    set_accelerator(monkeypatch, True)
    [line] = problems_of("--rollout-backend sglang --engine-python /nowhere/python").lines
    assert "/nowhere/python can't be run (No such file or directory)" in line


def test_a_machine_without_gpus_is_told_unless_a_cluster_may_have_them(tmp_path, monkeypatch):
    set_accelerator(monkeypatch, False)
    flags = f"--rollout-backend sglang --engine-python {make_interpreter(tmp_path, 'sglang')}"
    assert problems_of(flags).lines == [
        "--rollout-backend sglang: needs 1 GPU per engine, and this machine has none; a cluster (RAY_ADDRESS) or local works"
    ]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert problems_of(flags).lines == []


def test_shared_memory_is_refused_where_the_server_cannot_map_it(tmp_path, monkeypatch):
    set_accelerator(monkeypatch, True)
    python = make_interpreter(tmp_path, "sglang")
    [line] = problems_of(f"--rollout-backend sglang --engine-python {python} --update-weight-transfer-mode shm").lines
    assert line == "--update-weight-transfer-mode shm: the sglang backend can't take it; auto, disk and broadcast work"


def test_settings_that_a_backend_ignores_are_said(tmp_path, monkeypatch):
    set_accelerator(monkeypatch, True)
    assert "--engine-python x has no effect" in problems_of("--rollout-backend local --engine-python x").warnings[0]
    python = make_interpreter(tmp_path, "vllm")
    [line] = problems_of(f"--rollout-backend vllm --engine-python {python} --sglang-max-total-tokens 9").lines
    assert line.startswith("--sglang-max-total-tokens 9: vllm sizes its KV cache by memory")


def test_a_folder_of_that_name_in_the_current_one_is_no_server(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert why_not_importable(sys.executable, "vllm") == f"{sys.executable} has no module vllm"


# ---- SGLang's protocol


class Answers:
    def __init__(self, **statuses):
        self.statuses, self.calls = statuses, []

    async def request(self, method, url, payload=None):
        path = url.removeprefix("http://s:1/")
        self.calls.append((path, payload))
        return Reply(self.statuses.get(path, 200), {"weight_version": path})


@pytest.mark.parametrize(
    "path", ["update_weight_version", "update_weights_from_disk", "update_weights_from_distributed"]
)
@pytest.mark.parametrize("payload", [None, {"new_version": "2"}, {"abort_all_requests": True}])
def test_updates_always_say_whether_they_abort_and_do_so_only_on_request(path, payload):
    """V1: left out, the flag means that every running request is lost."""
    inner = Answers()
    asyncio.run(SglangTransport(inner).request("POST", f"http://s:1/{path}", payload))
    [(_, sent)] = inner.calls
    assert sent == {"abort_all_requests": False} | (payload or {})


@pytest.mark.parametrize(("status", "told_by"), [(200, "model_info"), (404, "get_weight_version")])
def test_an_old_server_tells_its_label_elsewhere(status, told_by):
    inner = Answers(model_info=status)
    reply = asyncio.run(SglangTransport(inner).request("GET", "http://s:1/model_info"))
    assert reply.body == {"weight_version": told_by}
