"""One command line, written as flags, as a YAML file, as a custom config, and by the functions that it names."""

import base64

import pytest

from miles.config import Problems, Settings, effects
from miles.config.explain import explain
from miles.errors import SettingsError
from miles.hooks import function_registry


def parsed(words):
    problems = Problems()
    return Settings.parse(words.split(), problems), problems


@pytest.fixture
def run_file(tmp_path):
    def write(text, name="run.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# ---- a YAML file


def test_a_file_holds_what_flags_say_and_flags_win(run_file):
    path = run_file(
        "fully-async: true\nlr: 1e-5\nrollout_batch_size: 8\neval-prompt-data: [reverse, eval.jsonl]\n"
        "apply_chat_template_kwargs: {enable_thinking: false}\nrun_name: 2026_07\nseed:\nuse_tis: false\n"
        "grpo_std_normalization: false\nsglang-mem-fraction-static: 0.7\n"
    )
    settings, problems = parsed(f"{path} --lr 2e-5")
    assert problems.lines == []
    assert (settings.fully_async, settings.train.lr, settings.rollout.rollout_batch_size) == (True, 2e-5, 8)
    assert [(d.name, d.path) for d in settings.eval_datasets] == [("reverse", "eval.jsonl")]
    assert settings.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert (settings.run.run_name, settings.model.seed) == ("2026_07", 1234)
    assert not settings.train.use_tis and not settings.train.grpo_std_normalization
    assert settings.passthrough == {"--sglang-mem-fraction-static": "0.7"}
    assert settings.sources["rollout_batch_size"] == f"{path}:3" and settings.sources["lr"] == "flag"
    assert parsed(f"--config {path}")[0].rollout.rollout_batch_size == 8
    assert parsed(f"--lr 1 --config={path}")[0].rollout.rollout_batch_size == 8


def test_a_flag_says_the_opposite_of_a_file(run_file):
    assert not parsed(f"{run_file('use_tis: true')} --no-use-tis")[0].train.use_tis


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lr: 1e-5\nrolout_batch_size: 8\n", ":2 rolout_batch_size: no such setting; did you mean rollout-batch-size?"),
        ("\nlr: x\n", ":2 --lr x: is not a number; for example 1e-06 works"),
        ("colocate: true\n", ":1 --colocate: is not here yet"),
        ("lr: 1e-5\nlr: 1e-6\n", ":2 lr: stands in this file twice; keep one of the two"),
        ("lr: [1e-5, 1e-6]\n", ":1 lr ['1e-5', '1e-6']: is more than the flag takes; one value works"),
        ("eps: 1\n", ":1 eps: no such setting"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_file_and_line(run_file, text, told):
    path = run_file(text)
    settings, problems = parsed(str(path))
    effects.check(settings, problems)
    [line] = problems.lines
    assert line.startswith(str(path)) and told in line


# ---- flags of servers


def test_flags_of_servers_are_handed_on_as_given():
    settings, problems = parsed(
        "--sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --eval-sglang-tp-size=2 --lr 1e-5 "
        "--router-worker-urls http://a:1 http://b:2 --no-eval-sglang-x --sglang-max-running-requests 9"
    )
    assert problems.lines == []
    assert settings.passthrough == {
        "--sglang-mem-fraction-static": "0.7",
        "--sglang-enable-dp-attention": True,
        "--eval-sglang-tp-size": "2",
        "--router-worker-urls": ("http://a:1", "http://b:2"),
        "--no-eval-sglang-x": True,
    }
    assert (settings.train.lr, settings.engine.sglang_max_running_requests) == (1e-5, 9)
    assert settings.namespace().sglang_mem_fraction_static == "0.7"


# ---- the custom config


def test_custom_config_wins_over_flags_and_gives_hooks_attributes(run_file):
    path = run_file("tis_mode: truncate\ntis_bounds: [0.5, 2.0]\nlr: 3e-6\n", "mis.yaml")
    settings, problems = parsed(f"--lr 1e-5 --custom-config-path {path}")
    assert problems.lines == [] and problems.notes == [f"{path}:3: lr 3e-6 overrides 1e-5"]
    assert settings.train.lr == 3e-6
    assert settings.namespace().tis_bounds == [0.5, 2.0]
    assert Settings.from_namespace(settings.namespace()).namespace().tis_mode == "truncate"


def test_an_attribute_is_no_abbreviation_of_a_flag(run_file):
    settings, problems = parsed(f"--custom-config-path {run_file('gam: 3')}")
    assert problems.lines == [] and settings.namespace().gam == 3 and settings.namespace().gamma == 1.0


def test_custom_config_may_be_text():
    text = base64.b64encode(b"tis_mode: mask").decode()
    assert parsed(f"--custom-config-path base64:{text}")[0].namespace().tis_mode == "mask"
    [line] = parsed("--custom-config-path base64:?")[1].lines
    assert line.startswith("--custom-config-path base64:?: can't be read")


# ---- flags that functions bring


def function_with(add):
    async def generate(args, sample, sampling_params):
        return sample

    generate.add_arguments = add
    return generate


def test_flags_of_a_named_function_reach_hooks():
    def add(parser):
        parser.add_argument("--max-turns", type=int, default=16)
        parser.add_argument("--max-seq-len", type=int)
        parser.add_argument("--tools", nargs="+")

    with function_registry.temporary("my.generate", function_with(add)):
        words = "--custom-generate-function-path my.generate --max-seq-len 512 --lr 1e-5 --tools a b"
        settings, problems = parsed(words)
    args = settings.namespace()
    assert problems.lines == [] and settings.train.lr == 1e-5
    assert (args.max_turns, args.max_seq_len, args.tools) == (16, 512, ["a", "b"])


def test_a_file_may_name_the_function_and_its_flags(run_file):
    def add(parser):
        parser.add_argument("--max-turns", type=int, default=16)

    with function_registry.temporary("my.generate", function_with(add)):
        settings, problems = parsed(str(run_file("custom_generate_function_path: my.generate\nmax_turns: 3\n")))
    assert problems.lines == [] and settings.namespace().max_turns == 3


def test_a_function_that_takes_a_flag_of_ours_is_told():
    def add(parser):
        parser.add_argument("--lr")

    with function_registry.temporary("my.generate", function_with(add)):
        [line] = parsed("--custom-generate-function-path my.generate")[1].lines
    assert line.startswith("--custom-generate-function-path my.generate") and "--lr" in line


def test_a_flag_that_a_function_needs_is_asked_for():
    def add(parser):
        parser.add_argument("--agent-url", required=True)

    with function_registry.temporary("my.generate", function_with(add)):
        words = "--custom-generate-function-path my.generate"
        assert parsed(f"{words} --agent-url http://a:1")[0].namespace().agent_url == "http://a:1"
        assert parsed(words)[1].lines[0].startswith("--agent-url is not set: ")


def test_flags_of_a_function_that_is_not_named_are_unknown():
    assert parsed("--max-turns 3")[1].lines[0].startswith("--max-turns: no such flag")


# ---- where everything comes from


def test_explain_tells_value_and_source_of_each_setting(run_file):
    path = run_file("rollout_batch_size: 8\n")
    settings, _ = parsed(f"{path} --n-samples-per-prompt 4 --sglang-tp-size 2")
    rows = [line.split() for line in explain(settings).splitlines()]
    assert ["--rollout-batch-size", "8", f"{path}:1"] in rows
    assert ["--n-samples-per-prompt", "4", "flag"] in rows
    assert ["--max-weight-staleness", "unset", "default"] in rows
    assert ["--sglang-tp-size", "2", "flag"] in rows
    assert ["batch_samples", "32", "--rollout-batch-size", "x", "--n-samples-per-prompt"] in rows


# ---- what can't be read


def test_a_flag_without_its_value_hides_no_other_problem():
    settings, problems = parsed("--lr --rollout-batch-size 8 --seed some --num-rollout")
    said = [line.split(": ")[0] for line in problems.lines]
    assert said == ["--lr", "--num-rollout", "--seed some"]
    assert "expected one argument" in problems.lines[0]
    assert settings.rollout.rollout_batch_size == 8


@pytest.mark.parametrize(("text", "told"), [
    (None, "there is no such file; a YAML file works: one `key: value` a line"),
    ("- lr\n", "holds no `key: value` lines"),
    ("lr: [1\n", "line 2, column 1"),
])  # fmt: skip
def test_a_run_file_that_cannot_be_read_is_the_one_problem(tmp_path, text, told):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        parsed(f"{path} --lr some")
    [line] = caught.value.problems
    assert line.startswith(str(path)) and told in line
