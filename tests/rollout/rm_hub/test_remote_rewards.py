"""Laws of asking a reward server: what is sent, what is repeated, what never is, and that no fault is a reward."""

import asyncio
from argparse import Namespace

import orjson
import pytest

from miles.config import Problems, Settings
from miles.engine.wire import Reply
from miles.errors import EngineUnreachable, RewardFailed, SettingsError
from miles.rollout.rm_hub import Rewards, async_rm, use_scorer
from miles.rollout.rm_hub.remote import RemoteRewards
from miles.rollout.rm_hub.scorer import DirectScorer
from miles.sim import clock
from miles.types import Sample

URL = "http://judge/score"


class Server:
    """A transport whose server answers each request with the next of ``replies`` (the last one for ever)."""

    def __init__(self, *replies, takes_s=0.0):
        self.replies, self.takes_s = list(replies), takes_s
        self.payloads, self.running, self.most_running = [], 0, 0

    async def request(self, method, url, payload=None):
        assert (method, url) == ("POST", URL)
        self.payloads.append(payload)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self):
        return


def ask(server, answers=1, *, concurrency=4, timeout_s=10.0, retries=3):
    """The rewards, and the virtual seconds that they took."""

    async def main():
        remote = RemoteRewards(concurrency=concurrency, timeout_s=timeout_s, retries=retries, transport=server)
        rewards = await asyncio.gather(*(remote.score(URL, "2+2=", "4", "4") for _ in range(answers)))
        return rewards, asyncio.get_running_loop().time()

    return clock.run(main())


@pytest.mark.parametrize(("body", "reward"), [(0.5, 0.5), (1, 1.0), ({"score": 1}, {"score": 1}), (None, None)])
def test_prompt_reply_and_label_are_sent_and_the_json_is_the_reward(body, reward):
    server = Server(Reply(200, body))
    assert ask(server) == ([reward], 0.0)
    assert server.payloads == [{"prompt": "2+2=", "response": "4", "label": "4"}]


@pytest.mark.parametrize("fault", [Reply(500, "oops"), Reply(503, None), EngineUnreachable("refused")])
def test_broken_connections_and_5xx_are_repeated_with_growing_waits(fault):
    server = Server(fault, fault, fault, Reply(200, 1.0))
    rewards, seconds = ask(server)
    assert rewards == [1.0]
    assert seconds == pytest.approx(0.1 + 0.2 + 0.4)


def test_server_that_stays_broken_is_a_failure_after_the_last_try():
    server = Server(Reply(500, "oops"))
    with pytest.raises(RewardFailed, match=r"--rm-url http://judge/score: 4 tries failed; .* 500: oops"):
        ask(server)
    assert len(server.payloads) == 4


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_4xx_is_never_repeated(status):
    server = Server(Reply(status, {"error": "no label"}))
    with pytest.raises(RewardFailed, match=f"answered {status}: .*no label"):
        ask(server)
    assert len(server.payloads) == 1


@pytest.mark.parametrize("body", ["fine", [1.0], float("nan")])
def test_reply_that_is_no_reward_is_a_failure_and_no_zero(body):
    with pytest.raises(RewardFailed, match=r"answered 200: .*a finite number, an object or None works"):
        ask(Server(Reply(200, body)))


def test_each_try_has_its_time_limit():
    with pytest.raises(RewardFailed, match=r"2 tries failed; the last one: no answer within 10 s"):
        ask(Server(Reply(200, 1.0), takes_s=11.0), retries=1)


def test_requests_at_a_time_are_bounded():
    server = Server(Reply(200, 1.0), takes_s=1.0)
    assert ask(server, answers=12) == ([1.0] * 12, 3.0)
    assert server.most_running == 4


def test_waits_between_tries_hold_up_nobody():
    server = Server(Reply(500, None), Reply(200, 1.0), takes_s=1.0)
    rewards, seconds = ask(server, answers=2, concurrency=1)
    assert rewards == [1.0, 1.0]
    assert seconds == pytest.approx(3.0)


def test_real_server_is_asked_through_one_session_that_closes_with_the_run():
    connections, bodies = set(), []

    async def answer(reader, writer):
        connections.add(writer.get_extra_info("peername"))
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            bodies.append(orjson.loads(await reader.readexactly(length)))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n0.5")

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        args = Namespace(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/", rm_concurrency=1, custom_rm_path=None)
        rewards = Rewards(args, DirectScorer())
        samples = [Sample(prompt=[{"role": "user", "content": "2+2="}], response="4") for _ in range(3)]
        samples[0].metadata["rm_type"], samples[0].response = "boxed_remote_rm", r"\boxed{4}"
        await rewards.score(samples, group=False)
        await rewards.close()
        server.close()
        return [s.reward for s in samples]

    assert asyncio.run(main()) == [0.5] * 3
    assert len(connections) == 1
    assert bodies == [{"prompt": [{"role": "user", "content": "2+2="}], "response": "4", "label": None}] * 3


def test_flags_reach_the_requests(monkeypatch):
    async def main():
        rewards = Rewards(args, DirectScorer())
        with pytest.raises(RewardFailed, match=r"2 tries failed; the last one: no answer within 3 s"):
            await rewards.score([Sample(response="4") for _ in range(4)], group=False)
        await rewards.close()
        return asyncio.get_running_loop().time()

    server = Server(Reply(200, 1.0), takes_s=5.0)
    monkeypatch.setattr("miles.rollout.rm_hub.remote.HttpTransport", lambda: server)
    flags = [
        "--rm-url",
        URL,
        "--rm-type",
        "remote_rm",
        "--rm-concurrency",
        "2",
        "--rm-timeout-s",
        "3",
        "--rm-retries",
        "1",
    ]
    args = Settings.parse(flags, Problems()).namespace()
    assert clock.run(main()) >= 2 * 2 * 3.0
    assert (len(server.payloads), server.most_running) == (8, 2)


def test_type_without_a_server_names_the_flag():
    async def main():
        use_scorer(DirectScorer())
        await async_rm(Namespace(rm_type="remote_rm", rm_url=None), Sample(index=7, response="4"))

    with pytest.raises(SettingsError, match=r"sample 7 .*remote_rm: --rm-url .* is needed"):
        clock.run(main())
