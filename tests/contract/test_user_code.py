"""User code of both eras, in `user_code/`, in whole runs: what was trained is what the hooks gave, within the bounds.

Each run starts train_async.py as a user does and combines many hooks; the hooks note what they saw in a journal.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.test_runs import LIMIT_S, rows

ROOT = Path(__file__).parents[2]
USER_CODE = Path(__file__).with_name("user_code")
MODEL = ROOT / "examples/quickstart/model"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}="
)
STEPS, PROMPTS, SAMPLES = 3, 4, 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


@pytest.fixture
def folder(tmp_path):
    """Data as users bring it: JSONL with messages and metadata, Parquet with tools."""
    digits = [f"{100_000 + 7_919 * i}" for i in range(40)]
    chat = [
        {"prompt": [{"role": "user", "content": d}], "label": d[::-1], "metadata": {"row": i}}
        for i, d in enumerate(digits)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    tools = [{"type": "function", "function": {"name": "99", "description": "a calculator"}}]
    table = [
        {"question": [{"role": "user", "content": d}], "answer": d[::-1], "tools": tools, "metadata": {"row": i}}
        for i, d in enumerate(digits)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "tools.parquet")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


TEMPLATED = "--apply-chat-template --chat-template-path template.jinja"
CHAT = f"--prompt-data chat.jsonl --input-key prompt --label-key label {TEMPLATED}"
WITH_TOOLS = f"--prompt-data tools.parquet --input-key question --label-key answer {TEMPLATED}"


def train(folder, flags, **variables):
    """Trains to the last step. Returns metrics by step, and the journal by kind."""
    words = (
        f"--hf-checkpoint {MODEL} --num-rollout {STEPS} --rollout-batch-size {PROMPTS} --n-samples-per-prompt {SAMPLES} "
        f"--global-batch-size {PROMPTS * SAMPLES} --rollout-max-response-len 8 --rollout-temperature 1 "
        "--rollout-skip-special-tokens --use-tis --lr 1e-4 --pause-generation-mode in_place --run-name r "
        f"--custom-reward-post-process-path rewards.centred {flags}"
    )
    path = os.pathsep.join([str(USER_CODE), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "JOURNAL": str(folder / "journal.jsonl"), **variables}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_async.py"), *words.split()],
        cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = rows(folder / "runs/r", "step")
    assert list(steps) == list(range(1, STEPS + 1))
    journal = {}
    for line in (folder / "journal.jsonl").read_text().splitlines():
        entry = json.loads(line)
        journal.setdefault(entry["kind"], []).append(entry)
    check_what_was_trained(steps, journal["trained"])
    return steps, journal


def check_what_was_trained(steps, trained):
    """Every step trains whole groups, none twice, with the rewards that the hook gives for these very responses."""
    size = PROMPTS * SAMPLES
    assert len(trained) == STEPS * size
    assert len({sample["index"] for sample in trained}) == len(trained)
    for sample in trained:
        assert sample["reward"] == share_of_digits(sample["response"], sample["label"])
        assert len(sample["tokens"]) > sample["response_length"] > 0
    for number, row in steps.items():
        batch = trained[(number - 1) * size : number * size]
        groups = [sample["group"] for sample in batch]
        assert all(groups.count(group) == SAMPLES for group in groups)
        assert row["rollout/raw_reward"] == pytest.approx(fmean(sample["reward"] for sample in batch))


def share_of_digits(response, label):
    return sum(a == b for a, b in zip(response, label, strict=False)) / len(label)


def oldest(steps):
    return max(row["rollout/fully_async/max_staleness"] for row in steps.values())


def dropped(steps, reason=""):
    return sum(row.get(f"rollout/dynamic_filter/drop{reason}", 0) for row in steps.values())


def prompt_of(sample, vocabulary):
    return "".join(vocabulary[i] for i in sample["tokens"][: len(sample["tokens"]) - sample["response_length"]])


@pytest.fixture(scope="module")
def vocabulary():
    return {i: token for token, i in json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"].items()}


# ---- the first era


def test_selector_path_legacy_generate_async_reward_and_bool_filter(folder, vocabulary):
    steps, journal = train(
        folder,
        f"--rollout-function-path miles.rollout.fully_async_rollout.generate_rollout_fully_async {CHAT} "
        "--custom-generate-function-path generate_by_http.generate --custom-rm-path rewards.awaited --reward-key score "
        "--dynamic-sampling-filter-path filters.not_every_fourth --max-weight-staleness 1",
        MILES_EXPERIMENTAL_ROLLOUT_REFACTOR="1",
    )
    assert oldest(steps) <= 1
    assert all(sample["group"] % 4 for sample in journal["trained"]) and dropped(steps) >= 1
    assert all(sample["metadata"]["row"] == sample["group"] for sample in journal["trained"])
    assert all(prompt_of(sample, vocabulary) == sample["label"][::-1] + "=" for sample in journal["trained"])


def test_old_selector_path_own_data_source_batched_reward_and_filter_with_reasons(folder):
    steps, journal = train(
        folder,
        "--rollout-function-path fully_async_rollout.generate_rollout_fully_async --max-weight-staleness 2 "
        "--data-source-path counting_source.CountingSource --disable-rollout-global-dataset --group-rm "
        "--custom-rm-path rewards.one_or_many --dynamic-sampling-filter-path filters.not_every_third",
    )
    assert oldest(steps) <= 2
    assert all(sample["group"] % 3 for sample in journal["trained"]) and dropped(steps, "_third") >= 1
    assert all(entry["count"] == SAMPLES and len(entry["groups"]) == 1 for entry in journal["together"])
    assert {tuple(e["groups"]) for e in journal["together"]} >= {(s["group"],) for s in journal["trained"]}


@pytest.mark.parametrize("function", ["with_the_global_worker", "with_a_worker_of_my_own"])
def test_rollout_functions_that_drive_the_worker_themselves(folder, function):
    _, journal = train(folder, f"--rollout-function-path own_rollouts.{function} {CHAT} --custom-rm-path rewards.plain")
    assert len(journal["batch"]) == STEPS
    assert all(isinstance(version, int) for entry in journal["batch"] for version in entry["oldest"])
    assert [entry["running"] for entry in journal.get("stopped", [])] == [False] * function.endswith("own")


# ---- today


def test_selector_class_generate_with_tools_and_plain_reward(folder, vocabulary):
    steps, journal = train(
        folder,
        f"--rollout-function-path miles.rollout.fully_async_rollout.FullyAsyncRolloutFn {WITH_TOOLS} "
        "--custom-generate-function-path two_turns.generate --custom-rm-path rewards.plain --max-weight-staleness 1 "
        "--eval-interval 3 --eval-prompt-data held_out tools.parquet@[:4] --skip-eval-before-train",
    )
    assert oldest(steps) <= 1
    for sample in journal["trained"]:
        assert prompt_of(sample, vocabulary) == "99" + sample["label"][::-1] + "="
        assert sample["metadata"]["tools"][0]["function"]["name"] == "99"
        mask, response = sample["loss_mask"], sample["tokens"][-sample["response_length"] :]
        assert mask[:3] == [1, 1, 0] and all(mask[3:]) and vocabulary[response[2]] == "="
        sampled = [i for _, start, end in sample["spans"] for i in range(start, end)]
        assert sampled == [i for i, trainable in enumerate(mask) if trainable]
    assert 0 <= rows(folder / "runs/r", "eval/step")[STEPS]["eval/held_out"] <= 1


def test_a_rollout_class_around_the_one_that_comes_with_miles(folder):
    steps, journal = train(
        folder, f"--rollout-function-path own_rollouts.Wrapped {CHAT} --custom-rm-path rewards.plain"
    )
    assert [entry["rollout_id"] for entry in journal["step"]] == list(range(STEPS))
    versions = [entry["version"] for entry in journal["step"]]
    assert versions == [row["rollout/version"] for row in steps.values()]
    assert {entry["groups"] for entry in journal["step"]} == {PROMPTS}
