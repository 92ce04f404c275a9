"""Each flag that launch scripts use has one row, is parsed, and then works, says that it does nothing, or is refused."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import miles
from miles.config import Problems, Settings, effects, known
from miles.config.flags import default_of, flag_fields, flag_name, hinted

PACKAGE = Path(miles.__file__).parent
OWN = {flag_name(s): (s, hint) for owner in Settings.owners().values() for s, hint in hinted(owner)}
OTHERS = Settings.known_rows()
DERIVED_HERE = {
    "--actor-num-gpus-per-node",
    "--prompt-data",
    "--train-backend",
    "--rollout-stop",
    "--rollout-stop-token-ids",
    "--eval-prompt-data",
    "--rollout-submission-granularity",
    "--async-unused-samples-handler",
    "--update-weight-transfer-mode",
    "--sglang-router-ip",
    "--sglang-router-port",
}
"""Flags whose default differs from the one that launch scripts know: it is a backend's, unset, or follows from others."""


def judged(argv, program="train_async"):
    problems = Problems()
    settings = Settings.parse(argv.split(), problems, program)
    effects.check(settings, problems)
    return problems


def words_that_change(row):
    """The flag with a value that is not its default."""
    name, default = row.flag, default_of(row.field)
    choices = [c for c in row.field.metadata["choices"] if c != default and c not in (default or ())]
    if row.hint is bool:
        return [name]
    if choices:
        return [name, choices[0]]
    if row.field.metadata["nargs"] == 2:
        return [name, "a", "b"]
    return [name, {"json": '{"a":1}', "str": "other"}.get(type_of(row), "7")]


def type_of(row):
    return next((name for name, hint in {**known.LISTS, **known.HINTS}.items() if hint == row.hint), "")


def in_force(row):
    """The words under which a row says something, before its own."""
    above = next((r for r in known.rows() if r.flag == row.under), None)
    return words_that_change(above) if above else []


def test_every_flag_has_one_row():
    assert [flag for flag, n in Counter(row.flag for row in known.rows()).items() if n > 1] == []
    assert len(known.rows()) > 400


def test_rows_name_flags_that_there_are():
    names = set(Settings.parser()._option_string_actions)
    for row in known.rows():
        assert row.text and set(re.findall(r"--[a-z][\w-]+", row.text)) <= names, row.flag
        assert row.under is None or row.under in names, row.flag


def test_what_the_table_calls_a_setting_is_one():
    assert [row.flag for row in OTHERS if row.kind == "setting"] == []


@pytest.mark.parametrize("row", [r for r in known.rows() if r.flag in OWN], ids=lambda r: r.flag)
def test_settings_have_the_defaults_that_launch_scripts_know(row):
    default = default_of(OWN[row.flag][0])
    assert (default == default_of(row.field)) is (row.flag not in DERIVED_HERE)


@pytest.mark.parametrize("row", OTHERS, ids=lambda r: r.flag)
def test_a_flag_that_is_no_setting_is_refused_or_says_that_it_does_nothing(row):
    problems = judged(" ".join([*in_force(row), *words_that_change(row)]), "train")
    told = [line for line in problems.warnings if row.flag in re.split(r"[ ,:]+", line)]
    refused = [line for line in problems.lines if line.split()[0].rstrip(":") == row.flag]
    assert bool(told) is (row.kind == "no effect"), (problems.lines, problems.warnings)
    assert len(refused) == (row.kind != "no effect")
    assert all(line.endswith(f"; {row.text}") for line in refused)


def test_flags_without_effect_share_one_warning_with_those_at_their_defaults():
    problems = judged("--tensor-model-parallel-size 2 --attention-dropout 0.0 --recompute-granularity full")
    assert problems.lines == []
    [line] = problems.warnings
    assert line.endswith(": --tensor-model-parallel-size, --recompute-granularity, --attention-dropout")


@pytest.mark.parametrize(("words", "used"), [
    ("--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl", False), ("--use-kl-loss --kl-loss-coef 0.01", True),
    ("--kl-loss-coef 0.01", False), ("--kl-coef 0.01", False),
    ("--kl-coef 0.01 --advantage-estimator reinforce_plus_plus --normalize-advantages", True),
])  # fmt: skip
def test_a_reference_is_loaded_only_for_a_kl_term_that_counts(words, used):
    assert judged(words).lines == []
    assert Settings.parse(words.split(), Problems()).uses_reference is used


def test_over_sampling_is_idle_in_a_fully_async_run_and_says_so():
    words = "--over-sampling-batch-size 64 --rollout-batch-size 32"
    assert judged(words + " --fully-async").warnings == [
        "--over-sampling-batch-size has no effect in a fully_async run"
    ]
    assert len(judged(words).lines) == 1


def test_choices_of_other_builds_are_told_from_typing_errors():
    assert judged("--train-backend megatron").lines == ["--train-backend megatron: is not here yet; one of fsdp works"]
    [line] = judged("--train-backend megatorn").lines
    assert "is none of the choices" in line


def test_a_setting_that_another_one_makes_meaningless_says_so():
    assert judged("--tis-clip 3").warnings == ["--tis-clip has no effect without --use-tis"]
    assert judged("--num-epoch 2 --num-rollout 8").warnings == ["--num-epoch has no effect beside --num-rollout"]
    assert judged("--tis-clip 3 --use-tis").warnings == []


def test_settings_that_depend_on_others_exist():
    names = {s.name for s, _ in OWN.values()}
    assert {*effects.NEEDS, *effects.NEEDS.values(), *effects.UNLESS, *effects.UNLESS.values()} <= names


def test_each_setting_is_read_by_the_code_that_it_is_for():
    """Outside of its definition, and of `namespace`, which hands everything to hooks."""
    read = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in nodes:
            if function.name != "namespace":
                read |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
                read |= set(re.findall(r'getattr\(args, "(\w+)"', ast.unparse(function).replace("'", '"')))
                if path.name == "command_line.py":
                    read |= {n.value for n in ast.walk(function) if isinstance(n, ast.Constant)}
    settings = {s.name for owner in Settings.owners().values() for s in flag_fields(owner)}
    assert settings - read == set()


def test_hooks_get_known_flags_at_their_defaults_and_as_given():
    args = Settings.parse(["--kl-loss-type", "k2"], Problems()).namespace()
    assert (args.colocate, args.rollout_global_dataset, args.kl_loss_type) == (False, True, "k2")
