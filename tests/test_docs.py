"""What the documentation says is what there is: its commands, flags, defaults, metrics, names, paths and snippets."""

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import get_args

import pytest
import torch

import miles
from miles import cli
from miles.cluster.actors import given_up_metric
from miles.config import Problems, Settings
from miles.config.flags import default_of, flag_fields, flag_name
from miles.config.owners import TrainSettings
from miles.config.settings import Mode
from miles.driver.check import check as check_rooms
from miles.observe.metrics import category_metrics, eval_metrics, rollout_metrics
from miles.observe.run_folder import EVAL_STEP, RunFolder
from miles.observe.snapshot import HeldBy, Snapshot, TrainerState, who_waits
from miles.rollout.generate_hub import agentic_tool_call, multi_turn
from miles.train import losses
from miles.types import PrefixCacheInfo, Sample, VersionSpan
from tests.markdown import Block, anchors_of, blocks_of, commands_of, prose_of, spans_of, tables_of, tree_of
from tests.test_layering import FLOORS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "miles"
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
GUIDE = ROOT / "docs" / "user-guide" / "fully-async.md"
ARCHITECTURE = ROOT / "docs" / "developer" / "architecture.md"
FLAGS = {flag_name(f): f for owner in Settings.owners().values() for f in flag_fields(owner)}
KNOWN = {row.flag for row in Settings.known_rows()}
"""Flags of launch scripts that are no settings of ours: the page that lists them may name them, and no other."""
REFERENCE = ROOT / "docs" / "reference" / "cli.md"
MILES_OPTIONS = {"--dry-run", "--help", "--sync", "--explain", "--no-", "--sglang-", "--eval-sglang-", "--router-"}
BROUGHT = argparse.ArgumentParser(add_help=False)
for function in (multi_turn.generate, agentic_tool_call.generate):
    function.add_arguments(BROUGHT)
"""What the shipped generate functions add to the command line."""
FOREIGN = {
    "pip": {"-e", "--no-deps"},
    "source": set(),
    "ruff": {"--check"},
    "mypy": set(),
    "tensorboard": {"--logdir"},
    "pytest": {"-m"},
    "miles.engine.conformance": {"--backend", "--model-path"},
    "miles.sim.kill_points": {"--seeds"},
    "miles.sim.laws": {"--seeds", "--first"},
    "benchmarks.control_plane": {"--quick"},
}
"""Programs that have a parser of their own, and their options that the docs may use."""
"""Programs that are not ours, and their options that the docs may use."""
QWEN = ("Qwen3-4B", "Qwen3-30B-A3B")
"""Folders of models that the docs' commands name."""
FAMILIES = "rollout|train|perf|eval"

each_doc = pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))


@cache
def sources():
    """All Python of ours but this file."""
    files = [*PACKAGE.rglob("*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("tests/**/*.py")]
    return "\n".join(f.read_text() for f in files if f != Path(__file__))


# ---- a checkout in which commands are run and looked at


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The current folder: the repository, what earlier commands of the docs have left in it, and no modules of users."""
    made = {"runs", "smollm2", *QWEN, "dapo-math-17k"}
    for entry in ROOT.iterdir():
        if entry.name not in made and not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    folder = RunFolder(tmp_path / "runs" / "first")
    folder.append_eval(0, {"eval/reverse": 0.0})
    folder.append_step(1, {"rollout/fully_async/max_staleness": 1.0})
    (tmp_path / "smollm2" / "model").mkdir(parents=True)
    (tmp_path / "smollm2" / "model" / "config.json").write_text("{}")
    for name in ("prompts.jsonl", "eval.jsonl"):
        (tmp_path / "smollm2" / name).write_text(json.dumps({"prompt": "8+15=", "label": "23"}) + "\n")
    put_qwen_and_its_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def put_qwen_and_its_data(folder):
    """Stand-ins for what a user has downloaded: a tokenizer with a chat template, and a data set of messages."""
    for model in (folder / name for name in QWEN):
        model.mkdir()
        for file in (ROOT / "examples/quickstart/model").glob("tokenizer*"):
            (model / file.name).write_text(file.read_text())
        (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40_960}))
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    data = folder / "dapo-math-17k"
    data.mkdir()
    row = {"prompt": [{"role": "user", "content": "8+15="}], "label": "23"}
    (data / "dapo-math-17k.jsonl").write_text(json.dumps(row) + "\n")


def write_modules(doc, folder):
    """Python blocks that start with a file's name are that file."""
    for block in blocks_of(doc):
        named = re.match(r"# (\w+\.py)\n", block.body) if block.language == "python" else None
        if named:
            (folder / named[1]).write_text(block.body)


@each_doc
def test_python_blocks_run(doc, checkout, monkeypatch):
    """One after the other, as in a session that was started in the checkout."""
    write_modules(doc, checkout)
    monkeypatch.syspath_prepend(checkout)
    names = {"__name__": "__main__"}
    for block in blocks_of(doc):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.body, str(doc), "exec"), names)


@each_doc
def test_shell_commands_would_run(doc, checkout, monkeypatch, capsys):
    """Flags go through the check that every start does; a text block after `miles check` is exactly what it prints."""
    write_modules(doc, checkout)
    blocks = blocks_of(doc)
    for block, after in pairwise([*blocks, Block("", "", 0)]):
        if block.language != "bash":
            continue
        for environment, words in commands_of(block):
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                if environment.get("PYTHONPATH") == ".":
                    patch.syspath_prepend(checkout)
                expected = after.body if after.language == "text" else None
                judge(words, checkout, capsys, expected)


def judge(words, checkout, capsys, expected):
    """Asserts that one command is one that works here."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        assert all(re.search(rf"^{a}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for a in arguments), words
    elif program == "bash":
        shown_words, folders = show(words, checkout)
        with pytest.MonkeyPatch.context() as patch:
            for folder in folders:
                patch.syspath_prepend(folder)
            judge(shown_words, checkout, capsys, expected)
    elif program == "ray":
        assert arguments[:3] == ["job", "submit", "--"]
        judge(arguments[3:], checkout, capsys, expected)
    elif program == "miles":
        judge_miles(arguments, capsys, expected)
    elif program.startswith("python"):
        judge_python(arguments)
    else:
        assert {a for a in arguments if a.startswith("-")} <= FOREIGN[program], words


def show(words, checkout):
    """What a script would execute in the place of Python, with the program it calls first; and the PYTHONPATH there."""
    stub = checkout / "python"
    stub.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv, os.environ.get('PYTHONPATH', '').split(os.pathsep)]))\n"
    )
    stub.chmod(0o755)
    done = subprocess.run(words, env=os.environ | {"PYTHON": str(stub)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def judge_miles(arguments, capsys, expected):
    command, *flags = arguments
    program = "train" if "--sync" in flags else "train_async"
    explain = "--explain" in flags
    flags = [f for f in flags if f not in ("--sync", "--explain")]
    if command == "train":
        check_flags(flags, program)
        return
    if command == "audit":
        assert len(flags) == 1 and flags[0].startswith("runs/")
        return
    assert command == "check"
    capsys.readouterr()
    code = cli.check(flags, program=program, explain=explain)
    out, err = capsys.readouterr()
    assert (expected is None and code == 0) or out + err == expected
    assert code == (0 if "no problems: " in out else 2)


def judge_python(arguments):
    if arguments[0] == "-m":
        module, *options = arguments[1:]
        if module != "venv":
            assert {o for o in options if o.startswith("-")} <= FOREIGN[module]
            assert all(Path(o).exists() for o in options if "/" in o and "://" not in o)
    elif Path(arguments[0]).name in ("train.py", "train_async.py"):
        check_flags(arguments[1:], Path(arguments[0]).stem)
    elif "--dry-run" in arguments:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert Path(arguments[0]).is_file(), arguments
        assert not [a for a in arguments if a.startswith("-")]


def check_flags(flags, program):
    flags = [f for f in flags if f != "--dry-run"]
    problems = Problems()
    settings = Settings.parse(flags, problems, program)
    check_rooms(settings, problems)
    assert problems.lines == []


# ---- flags


@each_doc
def test_flags_exist(doc):
    """In inline code each is judged by the command that it stands after; anywhere else it is one of ours."""
    for span in spans_of(doc):
        words = span.split()
        ours = {*FLAGS, *BROUGHT._option_string_actions, *MILES_OPTIONS, *(KNOWN if doc == REFERENCE else ())}
        allowed = FOREIGN.get(words[0], ours)
        unknown = {w.split("=")[0] for w in words if re.match(r"--\w", w)} - allowed
        assert not unknown, f"{span}: {unknown}"
    drawn = [b.body for b in blocks_of(doc) if b.language not in ("bash", "text")]
    bare = re.sub(r"`[^`\n]+`", "", prose_of(doc))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "\n".join([bare, *drawn]))) <= {*FLAGS, *KNOWN}


def shown(default):
    """A default as the tables give it; a flag that is not given is off, whatever it switches."""
    if default is None or isinstance(default, bool):
        return "unset" if default is None else "off"
    return "none" if default in ((), {}) else f"`{default}`"


@each_doc
def test_defaults_in_tables_are_those_of_the_code(doc):
    for header, rows in tables_of(doc):
        if header[:2] == ["flag", "default"]:
            table = {row[0].strip("`"): row[1] for row in rows}
            assert table == {name: shown(default_of(FLAGS[name])) for name in table}


def test_modes_and_exit_codes_of_the_user_guide_are_all_there_are():
    tables = {header[0]: rows for header, rows in tables_of(GUIDE)}
    assert [row[1].strip("`") for row in tables["program"]] == list(get_args(Mode))
    assert [row[0] for row in tables["exit code"]] == re.findall(r"\b\d+\b", cli.__doc__)


# ---- metrics and what the live view says


def literal_names(path):
    """Metric names that a module spells out; what is put in at run time becomes a ``*``."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [p.value if isinstance(p, ast.Constant) else "*" for p in parts if isinstance(p, ast.expr)]
        name = "".join(t for t in texts if isinstance(t, str))
        if re.match(rf"(?:{FAMILIES})/\w", name):
            yield name


@cache
def produced():
    """Every metric name that a run can write."""
    cached = PrefixCacheInfo(1, 2)
    spans = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)]
    samples = [
        Sample(tokens=[1, 2, 3], response_length=2, reward=1.0, version_spans=spans, prefix_cache_info=cached)
        for _ in range(4)
    ]
    names = {EVAL_STEP, *rollout_metrics([samples], version=3, reward_key=None, max_response_len=8)}
    names |= set(category_metrics([[Sample(reward={"why": "CATEGORY"})]], "why"))
    for evaluation in ("NAME", "reverse", "addition"):
        names |= set(eval_metrics(evaluation, [samples], reward_key=None))
    for path in (*PACKAGE.glob("driver/*.py"), PACKAGE / "cluster" / "actors.py", *PACKAGE.glob("train/*.py")):
        names |= set(literal_names(path))
    one = torch.zeros(1)
    inputs = losses.LossInputs(one, one, one, (1,), reference_log_probs=one)
    part = losses.policy_loss(one, one, inputs, TrainSettings(use_tis=True, use_opsm=True, use_kl_loss=True))
    trained = losses.metrics(part.shares, part.sums)
    return names | {f"train/{name}" for name in (*trained, "grad_norm")}


@each_doc
def test_metrics_are_written_by_a_run(doc):
    """Capitals in a name stand for what a run puts in: `eval/NAME-pass@K`."""
    for name in set(re.findall(rf"(?<![\w/.<-])(?:{FAMILIES})/[\w@/-]+", doc.read_text())):
        pattern = re.sub(r"[A-Z]+", "[^/]+", name)
        assert name.endswith("/") or any(re.fullmatch(pattern, p) or fnmatch(name, p) for p in produced()), name


def test_figures_draw_nothing_that_no_run_writes():
    drawn = {name for file in ("plots", "panels") for name in literal_names(PACKAGE / "observe" / f"{file}.py")}
    written = produced()
    assert len(drawn) > 15
    assert {n for n in drawn if not any(w == n or fnmatch(w, f"{n}*") or fnmatch(n, w) for w in written)} == set()


@each_doc
def test_words_of_the_live_view_are_its_own(doc):
    rest = dict(version=1, running_samples=0, slots=1, buffered_groups=0, buffer_capacity=1, engines_serving=1)
    states = product(get_args(TrainerState), get_args(HeldBy))
    said = {part for t, h in states for part in who_waits(Snapshot(t, h, engines=1, **rest)).split("; ")}
    assert {s for s in spans_of(doc) if re.match(r"trainer |(new )?rollouts ", s)} <= said


def test_lost_groups_are_counted_as_the_user_guide_says():
    [rows] = [rows for header, rows in tables_of(GUIDE) if header == ["reason", "metric"]]
    told = {r: row[1].strip("`") for row in rows for r in re.findall(r"`(\w+)`", row[0])}
    worker = "".join((PACKAGE / "rollout" / f"{name}.py").read_text() for name in ("worker", "feed", "buffer_hook"))
    assert all(f'"{reason}"' in worker for reason in told)
    assert {r: given_up_metric(r) for r in told} == {r: name.replace("REASON", r) for r, name in told.items()}


# ---- names and paths


@each_doc
def test_names_in_code_font_exist(doc):
    """`miles.a.b` can be imported; a `ClassName` or `some_name` stands in our sources."""
    for word in {word for span in spans_of(doc) for word in span.split()}:
        if re.fullmatch(r"miles(\.\w+)+", word):
            module, _, name = word.rpartition(".")
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.import_module(word), word
        elif named := re.fullmatch(r"([A-Z]\w*[a-z]\w*|[a-z]+_[a-zA-Z_]*[a-zA-Z])(\(.*)?[,;]?", word):
            assert re.search(rf"\b{named[1]}\b", sources()), word


@each_doc
def test_paths_in_code_font_exist(doc):
    for span in spans_of(doc):
        if not re.fullmatch(r"/?\.?\w[\w./-]*", span) or re.match(rf"runs/|(?:{FAMILIES})/\w", span):
            continue
        if "/" in span or Path(span).suffix in (".py", ".sh", ".md", ".json", ".jsonl", ".html", ".png", ".toml"):
            assert exists(doc, span.strip("/")), span


def exists(doc, path):
    """Beside the document or in the repository; else a lone file name of ours, or one that our sources write or serve."""
    if (doc.parent / path).exists() or (ROOT / path).exists():
        return True
    if path.split("/")[0] in os.listdir(ROOT):
        return False
    ours = {file.name for folder in ("miles", "examples", "tests") for file in (ROOT / folder).rglob("*.*")}
    return path in ours or re.search(rf'["/]{re.escape(Path(path).name)}"', sources()) is not None


@each_doc
def test_links_lead_somewhere(doc):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(doc)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (doc.parent / path).resolve() if path else doc
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


# ---- maps


def test_the_map_of_rooms_is_the_tree():
    rooms = [p.parent for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE]
    there = {f"{room.relative_to(PACKAGE)}/" for room in rooms} | {p.name for p in PACKAGE.glob("*.py")}
    drawn = tree_of(ARCHITECTURE, "miles/")
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == there - {"__init__.py"}


def test_the_floors_are_those_that_the_layering_test_proves():
    [rows] = [rows for header, rows in tables_of(ARCHITECTURE) if header[0] == "floor"]
    assert {int(floor): set(re.findall(r"`(\w+)`", rooms)) for floor, rooms in rows} == {
        height: set(rooms) for height, rooms in enumerate(FLOORS, start=1)
    }


def test_the_run_folder_of_the_readme_is_what_the_sources_write():
    for entry in tree_of(ROOT / "README.md", "runs/"):
        assert re.search(rf'"{entry.strip("/")}[/"]', sources()), entry


def test_the_changelog_has_this_version():
    assert re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == miles.__version__


def test_what_the_tests_of_the_docs_look_for_is_there():
    """Each kind of thing above is really found, so that none of these tests passes on nothing."""
    assert len(DOCS) >= 8
    languages = [b.language for doc in DOCS for b in blocks_of(doc)]
    assert languages.count("python") >= 8 and languages.count("bash") >= 12 and languages.count("text") >= 2
    tables = [header for doc in DOCS for header, _ in tables_of(doc)]
    assert sum(header[:2] == ["flag", "default"] for header in tables) >= 5
