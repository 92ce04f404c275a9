"""Laws of the start-up check: every sample will get a reward, or there is one problem that says why not."""

import pytest

from miles.config import Problems, Settings
from miles.hooks import function_registry
from miles.rollout.rm_hub.check import check


def problems_of(*flags):
    problems = Problems()
    settings = Settings.parse([str(f) for f in flags], problems)
    check(settings, problems)
    return problems


@pytest.mark.parametrize("flags", [
    ["--rm-type", "math", "--label-key", "label"], ["--rm-type", "boxed_math", "--label-key", "label"],
    ["--custom-rm-path", "user.rm"], ["--custom-rm-path", "user.rm", "--group-rm"],
])  # fmt: skip
def test_usable_rewards_are_no_problem(flags):
    with function_registry.temporary("user.rm", lambda args, sample: 1.0):
        problems = problems_of(*flags)
    assert (problems.lines, problems.warnings) == ([], [])


@pytest.mark.parametrize(("flags", "said"), [
    (["--rm-type", "maths"], "--rm-type maths: there is no such reward type; exact_match, math"),
    (["--rm-type", "math"], "--label-key is not set: --rm-type math compares with a label"),
    (["--custom-rm-path", "no_such_module.rm"], "--custom-rm-path no_such_module.rm: no_such_module.rm: module"),
])  # fmt: skip
def test_each_fault_is_one_problem(flags, said):
    (line,) = problems_of(*flags).lines
    assert line.startswith(said)


def test_rows_may_bring_the_type(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "1+1="}\n')
    (line,) = problems_of("--prompt-data", path).lines
    assert line.startswith("--rm-type is not set: nor is --custom-rm-path")
    assert problems_of("--prompt-data", path, "--custom-generate-function-path", "user.generate").lines == []
    path.write_text('{"input": "1+1=", "metadata": {"rm_type": "math"}}\n')
    assert problems_of("--prompt-data", path).lines == []


def test_group_flag_alone_is_a_warning():
    problems = problems_of("--rm-type", "math", "--label-key", "label", "--group-rm")
    assert problems.lines == []
    assert "--group-rm has no effect" in problems.warnings[0]
