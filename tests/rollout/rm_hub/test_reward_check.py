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
    ["--rm-type", "dapo", "--label-key", "label", "--reward-key", "score", "--eval-reward-key", "acc"],
    ["--rm-type", "dapo", "--label-key", "label", "--custom-reward-post-process-path", "user.rm"],
    ["--rm-type", "remote_rm", "--rm-url", "http://judge:1/"], ["--rm-type", "ifbench"], ["--rm-type", "random"],
])  # fmt: skip
def test_usable_rewards_are_no_problem(flags):
    with function_registry.temporary("user.rm", lambda args, sample: 1.0):
        problems = problems_of(*flags)
    assert (problems.lines, problems.warnings) == ([], [])


@pytest.mark.parametrize(("flags", "said"), [
    (["--rm-type", "maths"], "--rm-type maths: there is no such reward type; exact_match, math"),
    (["--rm-type", "math"], "--label-key is not set: --rm-type math compares with a label"),
    (["--rm-type", "dapo", "--label-key", "l"], "--reward-key is not set: the reward of dapo is an object, of which one "
     "number is trained; score or acc works"),
    (["--rm-type", "boxed_dapo", "--label-key", "l", "--reward-key", "pred"], "--reward-key pred: the reward of boxed_dapo"),
    (["--rm-type", "dapo", "--label-key", "l", "--reward-key", "acc", "--eval-reward-key", "x"], "--eval-reward-key x: "),
    (["--rm-type", "remote_rm"], "--rm-url is not set: --rm-type remote_rm asks a server"),
    (["--rm-type", "remote_rm", "--rm-url", "http://judge:1/", "--rm-retries", "-1"], "--rm-retries -1: must not be"),
    (["--rm-type", "random", "--custom-reward-post-process-path", "no_such.hook"],
     "--custom-reward-post-process-path no_such.hook: no_such.hook: module no_such can't be imported"),
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


def test_missing_library_is_a_problem_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("miles.rollout.rm_hub.check.is_installed", lambda: False)
    (line,) = problems_of("--rm-type", "reasoning_gym").lines
    assert "reasoning-gym is not installed" in line and 'pip install "miles[reasoning-gym]" works' in line
    monkeypatch.setattr("miles.rollout.rm_hub.check.is_installed", lambda: True)
    assert problems_of("--rm-type", "reasoning_gym").lines == []


def test_type_that_needs_thinking_says_so_at_the_start():
    """THUDM/slime#2219: without its marks every reply gets 0, and nobody is told why."""
    (warning,) = problems_of("--rm-type", "deepscaler", "--label-key", "label").warnings
    assert "a reply without </think> or ###Response gets 0" in warning
    assert problems_of("--rm-type", "boxed_deepscaler", "--label-key", "label").warnings == []


def test_server_that_no_sample_asks_is_a_warning():
    (warning,) = problems_of("--rm-type", "math", "--label-key", "l", "--rm-url", "http://judge:1/").warnings
    assert warning.startswith("--rm-url has no effect on samples of --rm-type math")


def test_group_flag_alone_is_a_warning():
    problems = problems_of("--rm-type", "math", "--label-key", "label", "--group-rm")
    assert problems.lines == []
    assert "--group-rm has no effect" in problems.warnings[0]
