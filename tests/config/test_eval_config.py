"""An --eval-config names sets with settings of their own: the set's, then the defaults', then the flags'."""

import base64
import json
from dataclasses import replace

import pytest
import yaml

from miles.config import Problems, Settings
from miles.data.check import check as check_data
from miles.engine.fake import FakeEngine
from miles.rollout.check import check as check_rollout
from miles.rollout.data_source import eval_sets
from miles.rollout.rm_hub.check import check as check_rewards
from tests.virtual import settings_of, simulate

BASE = "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 2 --rollout-max-response-len 64 --rm-type math "
TEXT = """
eval:
  defaults: {n_samples_per_eval_prompt: 2, temperature: 0.25, top_p: 0.5}
  datasets:
    - name: one
      path: PATH
      temperature: 0
      stop: [END, "7"]
      stop_token_ids: [3]
      top_k: 5
      max_response_len: 9
      min_new_tokens: 2
      rm_type: f1
      input_key: q
      label_key: a
      custom_generate_function_path: miles.rollout.generate_hub.single_turn.generate
      metadata_overrides: {level: {deep: 1}}
    - {name: two, path: PATH, n_samples_per_eval_prompt: 3}
"""
OWN = {
    "temperature": 0.0, "top_p": 0.5, "top_k": 5, "max_new_tokens": 9, "min_new_tokens": 2, "stop": ["END", "7"],
    "stop_token_ids": [3],
}  # fmt: skip


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1=", "input": "2+2=", "a": "2", "metadata": {"rm_type": "math", "level": 0}}\n' * 2)
    return path


@pytest.fixture
def config(tmp_path, rows):
    def write(text=TEXT):
        path = tmp_path / "eval.yaml"
        path.write_text(text.replace("PATH", str(rows)))
        return path

    return write


def problems_of(*flags):
    problems = Problems()
    settings = Settings.parse([*BASE.split(), *map(str, flags)], problems)
    for check in (check_data, check_rollout, check_rewards):
        check(settings, problems)
    return [line for line in problems.lines if "--eval-" in line]


def test_yaml_json_and_base64_say_the_same(config, tmp_path):
    yaml_file = config()
    json_file = tmp_path / "eval.json"
    json_file.write_text(json.dumps(yaml.safe_load(yaml_file.read_text())["eval"]))
    encoded = "base64:" + base64.b64encode(yaml_file.read_bytes()).decode()
    sets = [settings_of(f"--eval-config {given}").eval_datasets for given in (yaml_file, json_file, encoded)]
    assert sets[0] == sets[1] == sets[2] and len(sets[0]) == 2


def test_a_set_wins_over_the_defaults_over_evaluation_over_training(config):
    flags = "--eval-temperature 0.75 --eval-top-k 7 --rollout-top-k 9 --rollout-stop X --eval-min-new-tokens 1"
    settings = settings_of(f"{BASE} --eval-config {config()} {flags}")
    one, two = settings.eval_datasets
    assert one.sampling_params() == OWN
    params = settings.eval_sampling_params() | two.sampling_params()
    assert {k: params[k] for k in ("temperature", "top_p", "top_k", "stop", "max_new_tokens", "min_new_tokens")} == {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "stop": ["X"], "max_new_tokens": 64, "min_new_tokens": 1,
    }  # fmt: skip


def test_every_value_of_a_set_reaches_its_samples_and_requests(config):
    flags = f"{BASE} --eval-config {config()} --eval-interval 2"
    one, two = eval_sets(settings_of(flags))
    assert [len(g) for g in [*one.groups, *two.groups]] == [2, 2, 3, 3]
    sample, other = one.groups[0][0], two.groups[0][0]
    assert (sample.prompt, sample.label) == ("1+1=", "2")
    assert sample.metadata == {"rm_type": "f1", "level": {"deep": 1}}
    assert sample.generate_function_path == "miles.rollout.generate_hub.single_turn.generate"
    assert (other.prompt, other.label, other.metadata["rm_type"]) == ("2+2=", None, "math")
    engine = FakeEngine(length=lambda payload, rng: 3)
    simulate(flags, engine, eval_sets=[one, two])
    asked = [r["sampling_params"] for r in engine.requests if r["rid"].startswith("-")]
    assert [{k: p[k] for k in OWN} for p in asked if p["top_k"] == 5] == [OWN] * 8
    assert [p["temperature"] for p in asked if p["top_k"] != 5] == [0.25] * 12


def test_it_is_what_is_evaluated_and_what_the_run_folder_holds(config):
    flags = ["--eval-config", str(config()), "--eval-prompt-data", "x", "y", "--eval-interval", "2"]
    settings = Settings.parse(flags, Problems())
    assert [d.name for d in settings.eval_datasets] == ["one", "two"]
    assert settings.namespace().eval_datasets == list(settings.eval_datasets)
    assert json.loads(settings.to_json())["eval_datasets"][0]["metadata_overrides"] == {"level": {"deep": 1}}


def test_sets_that_can_be_used_are_no_problem(config):
    assert problems_of("--eval-config", config(), "--eval-interval", 2) == []


@pytest.mark.parametrize(("text", "said"), [
    ("eval: [1]", "has no list of datasets; eval: {datasets:"),
    ("{}", "has no list of datasets"),
    ("eval: {datasets: []}", "has no list of datasets"),
    ("eval: {dataset: 1, datasets: [{name: a, path: PATH}]}", "eval.yaml dataset: no such part; did you mean datasets?"),
    ("eval: {datasets: [3]}", "datasets[0]: is 3, no object"),
    ("eval: {datasets: [{path: PATH}]}", "datasets[0]: has no name; name: NAME works"),
    ("eval: {datasets: [{name: a}]}", "eval.yaml a: has no path; path: PATH works"),
    ("eval: {datasets: [{name: a, path: PATH, temprature: 1}]}", "temprature: no such key; did you mean temperature?"),
    ("eval: {defaults: {top_q: 1}, datasets: [{name: a, path: PATH}]}", "defaults top_q: no such key; did you mean top_"),
    ("eval: {datasets: [{name: a, path: PATH, top_k: some}]}", "eval.yaml a top_k some: is not an integer"),
    ("eval: {datasets: [{name: a, path: PATH, top_k: [1]}]}", "a top_k ['1']: is more than one value"),
    ("eval: {datasets: [{name: a, path: PATH, metadata_overrides: x}]}", "a metadata_overrides x: "),
    ("eval: {datasets: [{name: a, path: PATH, n_samples_per_eval_prompt: 0}]}", "_eval_prompt 0: must be above 0"),
    ("eval: {datasets: [{name: a, path: none.jsonl}]}", "--eval-config a none.jsonl: there is no such file"),
    ("eval: {datasets: [{name: a, path: PATH}, {name: a, path: PATH}]}", "--eval-config a: the name is given to 2 files"),
    ("eval: {datasets: [{name: a, path: PATH, top_p: 2}]}", "--eval-config a top_p 2.0: is no share"),
    ("eval: {datasets: [{name: a, path: PATH, top_k: 0}]}", "--eval-config a top_k 0: keeps no token"),
    ("eval: {datasets: [{name: a, path: PATH, temperature: -1}]}", "--eval-config a temperature -1.0: must not be negative"),
    ("eval: {datasets: [{name: a, path: PATH, min_new_tokens: 65}]}", "a min_new_tokens 65: is no number of tokens that"),
    ("eval: {datasets: [{name: a, path: PATH, rm_type: maths}]}", "a rm_type maths: there is no such reward type"),
    ("eval: {datasets: [{name: a, path: PATH, custom_generate_function_path: no.f}]}", "generate_function_path no.f: "),
    ("eval: {", "expected"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_problem_with_what_works(config, text, said):
    [line] = problems_of("--eval-config", config(text), "--eval-interval", 2)
    assert said in line and line.startswith("--eval-config")


@pytest.mark.parametrize("given", ["none.yaml", "base64:?"])
def test_a_config_that_cannot_be_read_is_one_problem(given):
    [line] = problems_of("--eval-config", given, "--eval-interval", 2)
    assert line.startswith(f"--eval-config {given}: ")


def test_evaluation_has_bounds_of_its_own(rows):
    flags = (
        f"{BASE} --eval-prompt-data a {rows} --eval-interval 2 --eval-max-context-len 7 --rollout-max-context-len 32"
    )
    settings = settings_of(flags)
    bounds = {"eval": replace(settings.eval, eval_max_context_len=None)}
    unmeasured = eval_sets(
        replace(settings, **bounds, sampling=replace(settings.sampling, rollout_max_context_len=None))
    )
    sim = simulate(flags, FakeEngine(length=lambda payload, rng: 60), eval_sets=unmeasured)
    lengths = {s.response_length for e in sim.direct.evaluations for s in e.data["a"]["samples"]}
    assert lengths == {7 - len("2+2=")}
    assert {s.response_length for b in sim.trainer.batches for g in b.groups for s in g.samples} != lengths


@pytest.mark.parametrize(("flags", "said"), [
    ("--eval-max-context-len 7 --rollout-max-context-len 6", "--eval-max-context-len 7: engines are started for"),
    ("--eval-min-new-tokens 65", "--eval-min-new-tokens 65: is no number of tokens that a response may have; 0 to 64 works"),
    ("--eval-min-new-tokens -1", "--eval-min-new-tokens -1: is no number"),
])  # fmt: skip
def test_bounds_that_cannot_hold_are_named(rows, flags, said):
    [line] = problems_of("--eval-prompt-data", "a", rows, "--eval-interval", 2, *flags.split())
    assert line.startswith(said)
