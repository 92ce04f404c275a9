"""Laws of the reward processes: no answer holds one up, none is lost, and none outlives its run."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from miles.errors import RewardFailed
from miles.rollout.rm_hub import pool, rewards, rm_types
from miles.rollout.rm_hub.pool import ProcessScorer

pytestmark = pytest.mark.slow

HOSTILE = "$9^{9^{9^{9}}}$"


def run(law, *, processes=1, timeout_s=20.0):
    async def main():
        scorer = ProcessScorer(processes=processes, timeout_s=timeout_s)
        try:
            return await law(scorer)
        finally:
            await scorer.close()

    return asyncio.run(main())


def wait_ended(pid, timeout_s=20):
    """Whether a process ends in time."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(end)
    return bool(poll.poll(timeout_s * 1000))


async def busy(scorer, *, answers=1):
    """Tasks for hostile answers that have reached their processes."""
    await scorer.start()
    tasks = [asyncio.create_task(scorer.score("math", HOSTILE, "5")) for _ in range(answers)]
    await asyncio.wait(tasks, timeout=0.2)
    return tasks


def test_answer_at_the_limit_is_not_verified_and_the_next_hundred_are():
    """verl#5839: with the limits off, one answer hangs the run."""

    async def law(scorer):
        await scorer.start()
        before = scorer.pids
        assert await scorer.score("math", HOSTILE, "5") == 0.0
        assert scorer.statistics().timed_out == 1
        scores = await asyncio.gather(*(scorer.score("math", rf"\boxed{{{i}}}", str(i)) for i in range(100)))
        assert scores == [1.0] * 100
        assert len(scorer.pids) == len(before) == 2
        assert scorer.statistics().scored == 101
        assert scorer.statistics().failed == 0

    run(law, processes=2, timeout_s=1.0)


def test_time_in_the_queue_is_not_time_on_the_answer():
    async def law(scorer):
        await scorer.start()
        answers = [HOSTILE, HOSTILE, r"\boxed{5}"]
        return await asyncio.gather(*(scorer.score("math", a, "5") for a in answers)), scorer.statistics().timed_out

    assert run(law, timeout_s=1.0) == ([0.0, 0.0, 1.0], 2)


def test_dead_process_is_a_failure_and_no_zero():
    async def law(scorer):
        (task,) = await busy(scorer)
        os.kill(scorer.pids[0], signal.SIGKILL)
        with pytest.raises(RewardFailed, match="died with exit code -9"):
            await task
        assert (scorer.statistics().failed, scorer.statistics().scored) == (1, 0)
        assert await scorer.score("math", r"\boxed{5}", "5") == 1.0

    run(law)


def test_cancelled_answer_frees_its_place():
    async def law(scorer):
        for task in await busy(scorer, answers=3):
            task.cancel()
        assert await scorer.score("math", r"\boxed{5}", "5") == 1.0
        assert len(scorer.pids) == 1

    run(law)


def test_closing_wakes_whoever_waits_and_leaves_no_process():
    async def law(scorer):
        tasks = await busy(scorer, answers=3)
        pids = scorer.pids
        await scorer.close()
        await scorer.close()
        failures = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(f) for f in failures] == [RewardFailed] * 3
        assert scorer.pids == []
        with pytest.raises(RewardFailed, match="closed"):
            await scorer.score("math", "5", "5")
        return pids

    assert all(wait_ended(pid) for pid in run(law))


def test_cheap_types_need_no_process():
    async def law(scorer):
        assert await scorer.score("exact_match", "5", "5") == 1.0
        assert scorer.pids == []

    run(law)


def test_imports_of_a_type_come_before_its_first_answer_and_out_of_no_limit(monkeypatch):
    asked = []
    ask = pool._Place.ask

    async def recorded(place, line):
        request = json.loads(line)
        asked.append("load" if "load" in request else request["rm_type"])
        return await ask(place, line)

    async def law(scorer):
        limits = []
        monkeypatch.setattr(pool.asyncio, "timeout", lambda s: limits.append(s) or timeout(s))
        for _ in range(2):
            assert await scorer.score("math", "5", "5") == 1.0
        return limits

    timeout = asyncio.timeout
    monkeypatch.setattr(pool._Place, "ask", recorded)
    start, load, first, second = run(law)
    assert (start, load) == (pool.START_TIMEOUT_S, pool.START_TIMEOUT_S)
    assert (first, second) == (20.0, 20.0)
    assert asked == ["load", "math", "math"]


def test_fault_of_reward_code_is_counted_and_keeps_its_process():
    async def law(scorer):
        await scorer.start()
        before = scorer.pids
        for rm_type, metadata, said in (
            ("dapo", {}, "dapo failed: .*'x' is no integer"),
            ("gpqa", {"choices": ["a"]}, "gpqa failed: .*the label 'x' is none of the choices A"),
            ("ifbench", {"instruction_id_list": ["format:emoji"]}, "format:emoji needs a table of emoji"),
            ("ifbench", {"instruction_id_list": object()}, "the sample's metadata can't be sent to a process"),
        ):
            with pytest.raises(RewardFailed, match=said):
                await scorer.score(rm_type, "5", "x", metadata)
        assert (scorer.statistics().failed, scorer.statistics().scored) == (4, 0)
        assert scorer.pids == before
        assert await scorer.score("ifbench", "ab", "", {"instruction_id_list": ["format:no_whitespace"]}) == 1.0

    run(law)


def test_users_functions_do_not_block_the_loop():
    async def law(scorer):
        on_thread = await scorer.call(lambda: threading.current_thread() is threading.main_thread())
        assert not on_thread

    run(law)


def test_long_replies_and_odd_characters_get_through():
    async def law(scorer):
        assert await scorer.score("math", "\ud800\u2028\n" * 100_000 + r"\boxed{5}", "5") == 1.0

    run(law)


def test_each_event_loop_has_its_own_scorer():
    """THUDM/slime#2372: state made in one loop and awaited in another."""

    async def contended():
        args = type("Args", (), {"rm_type": "math", "custom_rm_path": None, "reward_processes": 1})
        samples = [rewards.Sample(response="5", label="5") for _ in range(4)]
        scores = await rewards.batched_async_rm(args, samples)
        await rewards._scorer(args).close()
        return scores

    def in_a_thread():
        verdicts.extend(asyncio.run(contended()))

    verdicts = []
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert verdicts + asyncio.run(contended()) == [1.0] * 8


def test_process_goes_on_after_a_fault_in_reward_code():
    requests = [{"rm_type": "none"}, {"rm_type": "math", "response": None}, {"rm_type": "math", "response": "5"}]
    lines = "".join(json.dumps({"response": "5", "label": "5"} | r) + "\n" for r in requests)
    command = [sys.executable, "-m", "miles.rollout.rm_hub.score_process", "20"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert replies[0] == {"ready": True}
    assert [list(r) for r in replies[1:]] == [["error"], ["error"], ["reward"]]


def test_type_that_a_process_cannot_load_is_no_verdict(monkeypatch):
    async def law(scorer):
        monkeypatch.setitem(rm_types.RM_TYPES, "broken", rm_types.RmType("no_such_module.score"))
        with pytest.raises(RewardFailed, match="broken"):
            await scorer.score("broken", "5", "5")
        assert await scorer.score("math", "5", "5") == 1.0

    run(law)


def test_no_process_outlives_its_parent():
    code = f"""
import asyncio, os, signal
from miles.rollout.rm_hub.pool import ProcessScorer

async def main():
    scorer = ProcessScorer(processes=2, timeout_s=0.5)
    await scorer.start()
    asyncio.create_task(scorer.score("math", {HOSTILE!r}, "5"))
    await asyncio.sleep(0.1)
    print(*scorer.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert all(wait_ended(pid) for pid in pids)


def test_reward_processes_import_without_torch():
    code = (
        "import sys, miles.rollout.rm_hub.score_process, miles.rollout.rm_hub.math; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
