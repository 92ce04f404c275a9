"""Laws of loading users' functions: registered names first, and an error says which part of the path is wrong."""

import math

import pytest

from miles.errors import HookError
from miles.hooks import function_registry, load_function


def test_path_names_an_attribute_of_a_module():
    assert load_function("math.sqrt") is math.sqrt


@pytest.mark.parametrize("path", [None, ""])
def test_empty_path_is_no_hook(path):
    assert load_function(path) is None


def test_registered_names_come_first_and_only_inside_the_block():
    with function_registry.temporary("math.sqrt", len):
        assert load_function("math.sqrt") is len
        with function_registry.temporary("math.sqrt", max):
            assert load_function("math.sqrt") is max
        assert load_function("math.sqrt") is len
    assert load_function("math.sqrt") is math.sqrt


@pytest.mark.parametrize(("path", "said"), [
    ("sqrt", "sqrt: a hook is named module.function"),
    ("math.", "math.: a hook is named module.function"),
    ("no_such_module.f", "no_such_module can't be imported: there is no such module on sys.path"),
    ("math.sqr", r"math .* has no sqr; did you mean math.sqrt\?"),
])  # fmt: skip
def test_wrong_part_of_a_path_is_named(path, said):
    with pytest.raises(HookError, match=said):
        load_function(path)


@pytest.mark.parametrize(("source", "said"), [
    ("import no_such_dependency", r"ModuleNotFoundError: No module named 'no_such_dependency' \(.*broken_hook.py:1\)"),
    ("\n1 / 0", r"ZeroDivisionError: division by zero \(.*broken_hook.py:2\)"),
    ("def f(:", "SyntaxError: "),
])  # fmt: skip
def test_module_that_fails_on_import_shows_its_own_line(tmp_path, monkeypatch, source, said):
    (tmp_path / "broken_hook.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError, match=f"broken_hook can't be imported: {said}"):
        load_function("broken_hook.f")
