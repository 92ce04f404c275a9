"""The door "is this server safe?": the shipped servers pass it, and each fault fails its own check and no other."""

import subprocess
import sys

import pytest

from miles.engine.conformance import Conformance, main
from miles.engine.fake import FakeEngine, FakeFleet, Reply, Status
from miles.sim import clock
from tests.engine.local.tiny import save_model
from tests.real_engine import serving

URL = "http://engine:1"


def failed_checks(engine, **options):
    async def ask():
        return await Conformance(URL, FakeFleet({URL: engine}), timeout_s=60.0, **options).run()

    return {v.check: v.why for v in clock.run(ask()) if v.passed is False}


def untested_checks(engine, **options):
    async def ask():
        return await Conformance(URL, FakeFleet({URL: engine}), timeout_s=60.0, **options).run()

    return {v.check: v.why for v in clock.run(ask()) if v.passed is None}


class Faulty(FakeEngine):
    """A fake whose replies to one path are changed: ``fault(reply) -> reply``."""

    def __init__(self, path, fault, **fields):
        super().__init__(**fields)
        self.path, self.fault = path, fault

    async def answer(self, path, payload):
        reply = await super().answer(path, payload)
        return self.fault(reply) if path == self.path else reply


def drop_last_log_prob(reply):
    meta = reply.body["meta_info"]
    ids = [e[1] for e in meta["output_token_logprobs"]]
    return Reply(200, reply.body | {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": [[-1.0, 1]]}})


class AbortsOnEveryLabel(FakeEngine):
    async def _control(self, path, payload):
        return await super()._control(path, payload | {"abort_all_requests": True})


class DropsAtWeights(FakeEngine):
    async def _update(self, payload):
        self._abort_all()
        return await super()._update(payload)


class ForgetsTheLabel(FakeEngine):
    async def _update(self, payload):
        return Reply(200, {"success": True})


class IgnoresPause(FakeEngine):
    async def _control(self, path, payload):
        return Reply(200, {}) if path == "/pause_generation" else await super()._control(path, payload)


class IgnoresAborts(FakeEngine):
    async def _control(self, path, payload):
        return Reply(200, {}) if path == "/abort_request" else await super()._control(path, payload)


def test_the_shipped_fake_is_safe_and_keeps_its_label():
    engine = FakeEngine(version="5")
    assert failed_checks(engine) == {}
    assert engine.version == "5"


@pytest.mark.parametrize(
    ("engine", "failed"),
    [
        (AbortsOnEveryLabel(), {"relabel"}),
        (DropsAtWeights(), {"update"}),
        (ForgetsTheLabel(), {"update"}),
        (IgnoresAborts(), {"abort"}),
        (Faulty("/model_info", lambda r: Reply(200, {"model_path": "fake"})), {"label", "relabel", "update"}),
        (Faulty("/health", lambda r: Reply(503, "starting")), {"health"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_fault_fails_its_own_check(engine, failed):
    assert set(failed_checks(engine)) == failed


def test_a_log_prob_missing_fails_every_check_that_samples():
    failed = failed_checks(Faulty("/generate", drop_last_log_prob))
    assert failed["tokens"] == "reply has 16 token ids but 1 log-probs"


def test_a_server_that_ignores_pauses_is_found_out():
    engine = IgnoresPause(token_s=0.0007)
    failed = failed_checks(engine)
    assert set(failed) == {"pause retract", "pause in_place"}
    assert failed["pause retract"] == "4 of 4 requests ended while generation was paused"


def test_requests_too_short_to_be_caught_running_prove_nothing():
    untested = untested_checks(FakeEngine(token_s=0.0), tokens=8)
    assert set(untested) == {"pause retract", "pause in_place", "relabel", "update"}
    assert "give more --tokens" in untested["relabel"]


def test_a_server_with_a_short_context_is_not_called_unsafe():
    def short():
        return FakeEngine(choose=lambda p: Status(400) if p["sampling_params"]["max_new_tokens"] > 64 else None)

    assert failed_checks(short()) == {}
    untested = untested_checks(short())
    assert set(untested) == {"abort", "pause retract", "pause in_place", "relabel", "update"}
    assert all("give fewer --tokens" in why for why in untested.values())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "sglang"])
def test_the_embedded_engine_is_safe_and_speaks_sglang(backend, tmp_path, capsys):
    with serving("--dtype", "float32", model=save_model(tmp_path, "qwen3")) as url:
        code = main([url, "--backend", backend, "--tokens", "200"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.splitlines()[-1] == f"{url} is safe for asynchronous RL"
    assert len(out.splitlines()) == 10


@pytest.mark.slow
def test_it_is_a_command_that_fails_where_nobody_answers():
    command = [sys.executable, "-m", "miles.engine.conformance", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.startswith("FAILED  health") and "NOT safe" in done.stdout
