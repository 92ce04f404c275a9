"""The examples of hooks that the trainer has a part in run: each as the file that it names, with the flags that it names."""

import asyncio
import importlib
import re
import sys
from pathlib import Path

import pytest

from miles.config import Problems, Settings
from miles.rollout.conversion import to_train_data
from miles.rollout.convert_hook import convert
from miles.rollout.post_process import post_process
from miles.train.batch import read_batch
from miles.types import FinishedGroup, Sample
from tests.markdown import blocks_of
from tests.train.tiny import VOCABULARY, make_batch, make_settings, running, save_model

PAGE = Path(__file__).parents[1] / "docs" / "user-guide" / "customization.md"
EXAMPLE = re.compile(r"# (\w+)\.py\n# (--.*)\n")
TRAINED = {"--custom-loss-function-path", "--custom-tis-function-path", "--custom-pg-loss-reducer-function-path"}


def examples():
    """Name to (flags, source) of the examples that use a flag of the trainer."""
    found = [(EXAMPLE.match(b.body), b.body) for b in blocks_of(PAGE) if b.language == "python"]
    return {head[1]: (head[2].split(), body) for head, body in found if head}


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in examples():
        monkeypatch.delitem(sys.modules, name, raising=False)

    def write(name):
        flags, source = examples()[name]
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        problems = Problems()
        settings = Settings.parse(flags, problems)
        assert problems.lines == []
        return settings

    yield write
    for name in examples():
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", [n for n, (flags, _) in examples().items() if TRAINED & set(flags)])
def test_example_trains(written, name, tmp_path):
    """It changes the gradient of the step, whatever else it says."""
    given = written(name).train
    model = save_model(tmp_path / "model")
    hooks = {f: getattr(given, f) for f in (
        "loss_type", "use_tis", "custom_loss_function_path", "custom_tis_function_path",
        "custom_pg_loss_reducer_function_path",
    )}  # fmt: skip
    norms = []
    for i, train in enumerate(({}, hooks)):
        with running(make_settings(model, **train), tmp_path, store=f"store-{i}") as trainer:
            norms.append(trainer.train(make_batch(), 0)["train/grad_norm"])
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def groups():
    def sample(index):
        status = Sample.Status.TRUNCATED if index == 3 else Sample.Status.COMPLETED
        return Sample(
            index=index, tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-0.5, -1.0], reward=float(index),
            status=status,
        )  # fmt: skip

    return [FinishedGroup(g, [sample(2 * g), sample(2 * g + 1)], 1, 1) for g in range(3)]


def test_example_of_a_converter_leaves_out_what_was_cut_off(written):
    settings = written("my_converter")
    batch = asyncio.run(
        convert(settings.reward.custom_convert_samples_to_train_data_path, settings.namespace(), groups())
    )
    [samples] = read_batch(batch, settings.train, optimizer_steps=1, vocabulary=VOCABULARY)
    assert [s.index for s in samples] == [0, 1, 2, 4, 5]


def test_example_of_a_post_process_trains_ranks(written):
    settings = written("my_rewards")
    shown, rewards = asyncio.run(
        post_process(settings.reward.custom_reward_post_process_path, settings.namespace(), groups())
    )
    assert to_train_data(shown, None, rewards)["raw_reward"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert rewards == pytest.approx([-1, -2 / 3, -1 / 3, 0, 1 / 3, 2 / 3])
