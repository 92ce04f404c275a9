"""Whole runs of the quickstart as a user starts them: real Ray, real engines over HTTP, real trainers."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles.driver.audit import audit
from tests.virtual import assert_audit_passes

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "run.sh"
LIMIT_S = 240

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


def command(*flags):
    return ["bash", str(QUICKSTART), *map(str, flags)]


def environment(**more):
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHON": sys.executable} | more


def run(folder, *flags, code=0, **more):
    """Runs the quickstart in ``folder`` (no checkout, empty PYTHONPATH) to its end; the run folder and the output.

    ``more``: environment variables."""
    done = subprocess.run(
        command("--run-name", "r", *flags),
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    home = folder / "runs" / "r"
    if code == 0:
        assert_audit_passes(home)
    return home, done.stdout + done.stderr


def rows(home, key):
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    return {row[key]: row for row in lines if key in row}


def events(home, kind):
    lines = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    return [e for e in lines if e["kind"] == kind]


def descendants(pid):
    """Every live process below ``pid``, and ``pid`` itself."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def started(folder, *flags):
    """A run of the quickstart that goes on; ended by force, with all that it started, if it is still there."""
    with process_of(command("--run-name", "r", *flags), folder, environment()) as process:
        yield process


@contextmanager
def process_of(words, folder, env):
    """A program whose output can be read while it runs; ended by force, with all that it started, at the end."""
    process = subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in descendants(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def read_until(process, pattern):
    """Reads the run's output up to the first line that matches."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        found = re.search(pattern, line)
        if found:
            return found
    raise AssertionError("the run ended before " + pattern + "\n" + "".join(seen))


def test_a_fully_async_run_learns_and_leaves_what_the_docs_promise(tmp_path):
    home, output = run(tmp_path, "--num-rollout", 40, "--use-tensorboard", "--save-interval", 20)
    steps, evals = rows(home, "step"), rows(home, "eval/step")
    assert list(steps) == list(range(1, 41))
    assert list(evals) == [0, 10, 20, 30, 40]
    assert evals[0]["eval/reverse"] < 0.15
    assert evals[40]["eval/reverse"] > 0.6
    assert max(s["rollout/fully_async/max_staleness"] for s in steps.values()) <= 4
    assert max(s["train/train_rollout_logprob_abs_diff"] for s in steps.values() if s["rollout/version"] == 1) < 1e-4
    for name in (
        "settings.json",
        "events.jsonl",
        "report.html",
        "plots/reward.png",
        "checkpoints/latest",
        "tensorboard",
    ):
        assert (home / name).exists(), name
    assert (home / "checkpoints" / "latest").read_text() == "step_000040"
    assert "step 40/40" in output


def test_synchronous_and_one_step_off_are_the_same_ring(tmp_path):
    flags = [
        f for f in QUICKSTART.read_text().splitlines() if "--fully-async" not in f and "--max-weight-staleness" not in f
    ]
    for program, bound in (("train.py", 0), ("train_async.py", 1)):
        script = tmp_path / f"{program}.sh"
        here = f'here="{QUICKSTART.parent}"'
        script.write_text("\n".join(flags).replace("train_async.py", program).replace(flags_here(flags), here))
        done = subprocess.run(
            ["bash", str(script), "--run-name", program, "--num-rollout", "4", "--eval-interval", "4"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert_audit_passes(tmp_path / "runs" / program)
        steps = rows(tmp_path / "runs" / program, "step")
        assert len(steps) == 4
        assert max(s["rollout/fully_async/max_staleness"] for s in steps.values()) <= bound


def flags_here(lines):
    return next(line for line in lines if line.startswith("here="))


def test_two_ranks_and_two_engines_train_and_resume_on_one(tmp_path):
    home, _ = run(tmp_path, "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2, "--num-rollout", 4)
    assert len(events(home, "engine_up")) == 2
    _, output = run(tmp_path, "--num-rollout", 8, "--load", home, "--update-weight-transfer-mode", "disk")
    steps = rows(home, "step")
    assert list(steps) == list(range(1, 9))
    assert [s["rollout/version"] for s in steps.values()] == list(range(1, 9))
    assert "step 8/8" in output


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_broadcast_in_buckets_to_two_engines(tmp_path, ranks):
    """Buckets that hold less than the largest tensor: each is one tensor or a few."""
    home, _ = run(
        tmp_path, "--actor-num-gpus-per-node", ranks, "--rollout-num-gpus", 2, "--num-rollout", 4,
        "--update-weight-transfer-mode", "broadcast", "--update-weight-buffer-size", 20_000,
    )  # fmt: skip
    assert len(events(home, "engine_up")) == 2
    steps = rows(home, "step")
    assert [s["rollout/version"] for s in steps.values()] == [1, 2, 3, 4]
    assert steps[1]["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert not events(home, "engine_down")


def test_a_killed_engine_is_restarted_and_serves_only_current_weights(tmp_path):
    with started(tmp_path, "--num-rollout", 60, "--eval-interval", 60) as process:
        read_until(process, r"^step 5/")
        home = tmp_path / "runs" / "r"
        os.kill(events(home, "engine_up")[0]["pid"], signal.SIGKILL)
        read_until(process, r"^step 60/")
        process.stdout.read()
        assert process.wait(LIMIT_S) == 0
    assert_audit_passes(home)
    ups, downs = events(home, "engine_up"), events(home, "engine_down")
    assert [e["restarts"] for e in ups] == [0, 1]
    assert "exit code -9" in downs[0]["why"]
    assert rows(home, "eval/step")[60]["eval/reverse"] > 0.6
    assert max(s["rollout/fully_async/max_staleness"] for s in rows(home, "step").values()) <= 4


def kill_all(process):
    """SIGKILL to the run and everything below it, as a machine that goes down would; what shared memory it had stays."""
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(LIMIT_S)


@pytest.mark.parametrize("after", [2, 7])
def test_a_run_that_is_killed_with_all_its_processes_goes_on_where_it_was(tmp_path, after):
    """Before its first checkpoint and after it."""
    flags = ("--num-rollout", 12, "--save-interval", 5, "--eval-interval", 12)
    with started(tmp_path, *flags) as process:
        read_until(process, rf"^step {after}/")
        kill_all(process)
    home = tmp_path / "runs" / "r"
    assert_audit_passes(home)
    run(tmp_path, *flags, "--load", home)
    assert list(rows(home, "step")) == list(range(1, 13))
    [resumed] = events(home, "resumed")
    assert resumed["after_step"] == (5 if after == 7 else 0)
    assert resumed["groups_kept"] > 0
    result = audit(home)
    assert (result.steps, result.lineages) == (12, 2)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_no_process_and_no_shared_memory(tmp_path, sign):
    with started(tmp_path, "--num-rollout", 10_000) as process:
        read_until(process, r"^step 3/")
        family = descendants(process.pid)
        assert len(family) > 5
        assert list(Path("/dev/shm").glob(f"miles-{process.pid}-*")) != []
        os.kill(process.pid, sign)
        output = process.stdout.read()
        assert process.wait(LIMIT_S) == (130 if sign == signal.SIGINT else 143), output
    assert_audit_passes(tmp_path / "runs" / "r")
    assert [pid for pid in family if alive(pid)] == []
    assert list(Path("/dev/shm").glob(f"miles-{process.pid}-*")) == []
    assert "Traceback" not in output


def test_a_run_whose_model_cannot_be_served_ends_with_the_engines_own_words(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in (QUICKSTART.parent / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "model.safetensors").write_bytes(b"broken")
    _, output = run(tmp_path, "--hf-checkpoint", model, code=1)
    assert "miles stopped:" in output
    assert str(model) in output
    assert "Traceback" not in output


def test_settings_that_cannot_work_are_all_told_and_nothing_starts(tmp_path):
    _, output = run(tmp_path, "--prompt-data", "nowhere.jsonl", "--global-batch-size", 100, "--bogus", code=2)
    assert "problems in the settings" in output
    for word in ("--prompt-data nowhere.jsonl", "--global-batch-size 100", "--bogus"):
        assert word in output
    assert not (tmp_path / "runs").exists()


def test_a_script_without_miles_installed_says_how_to_install_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(ROOT / "train_async.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "pip install" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_run_draws_from_a_mix_passes_over_long_prompts_and_resumes(tmp_path):
    lines = [json.loads(line) for line in (QUICKSTART.parent / "prompts.jsonl").read_text().splitlines()[:64]]
    long = [{"prompt": "1" * 20 + "=", "label": "1"}] * 16
    pq.write_table(pa.Table.from_pylist(lines[32:] + long), tmp_path / "b.parquet", row_group_size=8)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mix = [f"{tmp_path}/a.jsonl@[:32]*0.5", f"{tmp_path}/b.parquet*0.5"]
    flags = ("--prompt-data", *mix, "--rollout-max-context-len", 16, "--rollout-batch-size", 8, "--save-interval", 2)
    home, _ = run(tmp_path, *flags, "--num-rollout", 10, "--eval-interval", 100)
    steps = rows(home, "step")
    assert sum(step["rollout/skipped_long_prompts"] for step in steps.values()) >= 1
    [told] = events(home, "prompts_too_long")
    assert (
        told["first"].startswith(f"{tmp_path}/b.parquet:")
        and "--rollout-max-prompt-len (--rollout-max-context-len 16 - 1) is 15" in told["first"]
    )
    run(tmp_path, *flags, "--num-rollout", len(steps) + 2, "--eval-interval", 100, "--load", home)
    assert len(rows(home, "step")) == len(steps) + 2
    _, output = run(tmp_path, "--prompt-data", mix[0], "--num-rollout", 20, "--load", home, code=2)
    assert "--prompt-data: rows is 32 now and was 80 in the checkpoint" in output


def test_saved_rollouts_train_the_same_steps_again_without_an_engine(tmp_path):
    sizes = ("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--num-rollout", 4)
    flags = (*sizes, "--save-debug-rollout-data", "kept/{rollout_id}.pt", "--debug-exit-after-rollout", 2)
    home, _ = run(tmp_path, *flags, "--eval-interval", 100, "--skip-eval-before-train")
    first = rows(home, "step")
    assert list(first) == [1, 2, 3]
    home.rename(home.with_name("first"))
    script = [line for line in QUICKSTART.read_text().splitlines() if "--eval" not in line]
    replay = tmp_path / "replay.sh"
    replay.write_text("\n".join(script).replace(flags_here(script), f'here="{QUICKSTART.parent}"'))
    words = ["bash", replay, "--run-name", "r", *sizes, "--load-debug-rollout-data", "kept/{rollout_id}.pt"]
    words += ["--debug-exit-after-rollout", 2]
    done = subprocess.run(
        list(map(str, words)), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    again = rows(home, "step")
    assert events(home, "engine_up") == []
    for name in ("train/loss", "train/grad_norm", "rollout/raw_reward", "rollout/fully_async/max_staleness"):
        assert [row[name] for row in again.values()] == [row[name] for row in first.values()], name


def test_a_rollout_only_run_samples_from_the_first_weights_alone(tmp_path):
    sizes = ("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--num-rollout", 3, "--eval-interval", 3)
    home, _ = run(tmp_path, *sizes, "--debug-rollout-only", "--start-rollout-id", 1)
    steps = rows(home, "step")
    assert list(steps) == [2, 3]
    assert [row["rollout/weight_version/max"] for row in steps.values()] == [1, 1]
    assert not [name for row in steps.values() for name in row if name.startswith("train/")]
    assert list(rows(home, "eval/step")) == [3]
    assert not (home / "checkpoints").exists()


HOOKS = """
def convert(args, samples):
    kept = [s for s in samples if s.index % 5]
    return {
        "tokens": [s.tokens for s in kept], "response_lengths": [s.response_length for s in kept],
        "loss_masks": [[1] * s.response_length for s in kept],
        "rollout_log_probs": [s.rollout_log_probs for s in kept],
        "raw_reward": [s.get_reward_value(args) for s in kept], "sample_indices": [s.index for s in kept],
    }


def loss(args, batch, logits, sum_of_sample_mean):
    assert all(index % 5 for index in batch["sample_indices"])
    mean = sum_of_sample_mean(logits.logsumexp(-1))
    return 1e-6 * mean, {"mine": mean.item()}


def broken(args, batch, logits, sum_of_sample_mean):
    return batch["nothing"]
"""


def test_hooks_of_the_trainer_run_where_they_are_called(tmp_path):
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    small = ("--num-rollout", 2, "--rollout-batch-size", 8, "--eval-interval", 2)
    own = ("--loss-type", "custom_loss", "--custom-loss-function-path")
    home, _ = run(
        tmp_path, *small, *own, "my_hooks.loss", "--custom-convert-samples-to-train-data-path", "my_hooks.convert",
        PYTHONPATH=".",
    )  # fmt: skip
    assert all(row["train/mine"] > 0 for row in rows(home, "step").values())
    _, output = run(tmp_path, *small, *own, "my_hooks.broken", "--run-name", "broken", code=1, PYTHONPATH=".")
    assert re.search(r"my_hooks\.broken failed on samples .*KeyError: 'nothing' \(.*my_hooks\.py:\d+\)", output)


def test_a_run_is_held_to_a_model_and_the_next_to_that_runs_checkpoint(tmp_path):
    small = ("--num-rollout", 2, "--rollout-batch-size", 8, "--eval-interval", 2)
    kl = ("--use-kl-loss", "--kl-loss-coef", 0.01, "--kl-loss-type", "low_var_kl")
    first, output = run(tmp_path, *small, *kl, "--advantage-estimator", "gspo")
    assert "the reference of the KL term is the model of --hf-checkpoint" in output
    kls = [row["train/kl_loss"] for row in rows(first, "step").values()]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[1] > 0
    run(
        tmp_path, *small, "--ref-load", first, "--run-name", "second",
        "--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "--kl-coef", 0.01,
    )  # fmt: skip
    assert rows(tmp_path / "runs" / "second", "step")[1]["rollout/ref_log_probs"] < 0
