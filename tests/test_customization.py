"""Every example of the page on hooks runs: as the file that it names, with the flags that it names, until training ends.

An example is a Python block whose first line is `# FILE.py` and whose second starts with `# --`, the flags that use it. It
runs on the virtual clock, and all of its functions must have been called. Hooks of the trainer, which has no part there,
are run by `test_customization_training`.
"""

import ast
import asyncio
import re
import sys
import threading
from pathlib import Path

import pytest

from miles.engine.fake import FakeEngine
from miles.errors import HookError
from miles.hooks import function_registry
from miles.rollout.data_source import make_data_source
from miles.rollout.fully_async_data_buffer import DefaultDataBuffer
from miles.rollout.rm_hub import Rewards
from miles.rollout.rm_hub.scorer import DirectScorer
from miles.sim import clock
from tests.cluster.test_rollout_side import side_of
from tests.markdown import blocks_of
from tests.virtual import simulation

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "user-guide" / "customization.md"
PROMPTS = ROOT / "examples" / "quickstart" / "prompts.jsonl"
BASE = (
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 4 --rollout-max-response-len 64 "
    f"--prompt-data {PROMPTS} --input-key prompt --label-key label "
)
LONG_TAIL = lambda payload, rng: 1 + int(63 * rng.random() ** 2)  # noqa: E731
EXAMPLE = re.compile(r"# (\w+)\.py\n# (--.*)\n")


def examples():
    """Name to (flags, source) of each example."""
    found = [(EXAMPLE.match(block.body), block.body) for block in blocks_of(PAGE) if block.language == "python"]
    assert all(head for head, _ in found), "an example says its file and its flags in its first two lines"
    return {head[1]: (head[2], body) for head, body in found}


def run_on_the_virtual_clock(flags):
    """A whole run with its rewards in place, on two engines; what was given back to its source is drawn first."""
    own_reward = "" if "--custom-rm-path" in flags else " --rm-type deterministic_random"
    program = "train" if "--rollout-function-path" in flags else "train_async"
    sim = simulation(
        BASE + flags + own_reward, FakeEngine(length=LONG_TAIL), FakeEngine(length=LONG_TAIL), program=program
    )
    args = sim.settings.namespace()
    sim.trainer.reward_key = args.reward_key
    sim.scoring = Rewards(args, DirectScorer())
    sim.source = make_data_source(args, sim.settings.data.data_source_path)
    if "--buffer-filter-path" in flags:
        sim.source.add_samples(sim.source.get_samples(2))
    clock.run(sim.run())
    assert len(sim.trainer.batches) == 4
    return sim


OF_THE_TRAINER = re.compile("reward-post-process|convert-samples|loss-function|tis-function|reducer-function")


def log_of_a_rollout_side(flags):
    """What the rollout actor makes of a batch, and of an evaluation, with the metrics that the function added."""
    [path] = re.findall(r"log-function-path (\S+)", flags)
    side = side_of("--reward-key", "score", *flags.split())
    _, metrics = asyncio.run(side.take_batch(0))
    evaluation = asyncio.run(side.evaluate(0))
    assert metrics.get("ended/pending") == 2 or evaluation.get("eval/held_out-prompts_solved") == 1, path


RUNNERS = {"log-function-path": log_of_a_rollout_side}
"""Flag to what runs an example that uses it, ``f(flags)``; by default `run_on_the_virtual_clock`."""


def functions_of(source):
    return {
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Names of the functions under ``tmp_path`` that were called, in this thread or one that it started."""
    names = set()

    def watch(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(tmp_path)):
            names.add(frame.f_code.co_name)

    monkeypatch.syspath_prepend(tmp_path)
    before, outer = set(sys.modules), sys.getprofile()
    sys.setprofile(watch)
    threading.setprofile(watch)
    yield names
    threading.setprofile(None)
    sys.setprofile(outer)
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize("name", [n for n, (flags, _) in examples().items() if not OF_THE_TRAINER.search(flags)])
def test_example_runs(name, tmp_path, called):
    flags, source = examples()[name]
    (tmp_path / f"{name}.py").write_text(source)
    run = next((run for flag, run in RUNNERS.items() if flag in flags), run_on_the_virtual_clock)
    run(flags)
    assert called >= functions_of(source)


def test_each_hook_of_the_table_has_an_example_or_a_page():
    rows = re.findall(r"^\| `(--[\w-]+)` \|(.*)$", PAGE.read_text().split("\n## ")[0], re.MULTILINE)
    used = " ".join(flags for flags, _ in examples().values())
    assert len(rows) >= 9
    assert [flag for flag, rest in rows if flag not in used and "](" not in rest] == []


# ---- a hook that fails


class _Fails:
    """A source, a buffer or a rollout class that fails when it is used."""

    def __init__(self, *given):
        pass

    def __call__(self, *given, **more):
        raise KeyError("mine")

    get_samples = __call__


class _FailingBuffer(DefaultDataBuffer):
    async def put(self, input):
        raise KeyError("mine")


def _fails(*given, **more):
    raise KeyError("mine")


async def _fails_async(*given, **more):
    raise KeyError("mine")


async def _generate(args, sample, sampling_params):
    raise KeyError("mine")


@pytest.mark.parametrize(("flag", "hook", "on"), [
    ("--rollout-function-path", _fails_async, "step 0"),
    ("--custom-generate-function-path", _generate, r"sample \d+"),
    ("--custom-rm-path", _fails_async, r"sample \d+"),
    ("--custom-rm-path", _fails, r"sample \d+"),
    ("--group-rm --custom-rm-path", _fails_async, r"samples \d+ to \d+"),
    ("--dynamic-sampling-filter-path", _fails, r"the group of sample \d+"),
    ("--rollout-sample-filter-path", _fails, "a batch of 4 groups"),
    ("--buffer-filter-path", _fails, "a buffer of 2 groups"),
    ("--data-source-path", _Fails, "draw 0"),
    ("--custom-async-data-buffer-path", _FailingBuffer, r"the group of sample \d+"),
])  # fmt: skip
def test_a_hook_that_fails_names_itself_what_it_failed_on_and_its_own_line(flag, hook, on):
    limit = " --rollout-failure-limit 1 --rollout-retry-budget 0"
    with function_registry.temporary("user.hook", hook), pytest.raises(Exception) as caught:
        run_on_the_virtual_clock(f"{flag} user.hook{limit}")
    said = [str(e) for e in causes(caught.value) if isinstance(e, HookError)]
    named = r"(user\.hook|dynamic filter _fails).* failed on "
    assert said and re.search(rf"{named}{on}: KeyError: 'mine' \(.*test_customization\.py:\d+\)", said[-1]), said


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__
