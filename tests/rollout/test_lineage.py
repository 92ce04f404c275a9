"""A run that was ended anywhere goes on as if it had not been: nothing lost, nothing twice, nothing sampled again in vain."""

import json
import shutil
from contextlib import closing
from sqlite3 import connect
from typing import ClassVar

import pytest

from miles.driver.audit import audit
from miles.driver.checkpoints import find_checkpoint
from miles.engine.fake import FakeEngine, Say
from miles.errors import LedgerError, SettingsError
from miles.hooks import function_registry
from miles.rollout.data_source import DataSource, RolloutDataSourceWithBuffer
from miles.rollout.ledger import Ledger
from miles.rollout.ledger_store import FILE, LedgerFile, PlaceStore
from miles.rollout.lineage import StartingPoint, go_back
from miles.sim.trainer import FakeTrainer
from miles.types import Sample, VersionSpan, iter_samples
from tests.virtual import assert_audit_passes, run_in, settings_of

FLAGS = (
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 64 --max-weight-staleness 2 "
    "--async-max-concurrent-samples 24 --input-key prompt --save-interval 2 --num-rollout 8 "
)
LENGTHS = dict(length=lambda payload, rng: 1 + int(60 * rng.random() ** 3), token_s=0.02)


@pytest.fixture
def data(tmp_path):
    def written(rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(rows)))
        return f"--prompt-data {path} "

    return written


def source_of(flags):
    return RolloutDataSourceWithBuffer(settings_of("--fully-async " + flags).namespace())


def go(home, flags, **more):
    return run_in(home, flags, FakeEngine(**LENGTHS), source=source_of(flags), **more)


class Counting(FakeTrainer):
    """Looks at how many groups are outstanding whenever a step has been trained, before it is committed."""

    def __init__(self, **times):
        super().__init__(**times)
        self.outstanding = []

    async def train(self, data, step):
        result = await super().train(data, step)
        self.outstanding.append(self.rollouts.inner.status()["outstanding_groups"])
        return result


def in_ledger(home, select):
    with closing(connect(home / FILE)) as connection:
        return [value for (value,) in connection.execute(select)]


def trained_in(home):
    """The prompts of every trained group, by step: what the run learned from in the end."""
    return in_ledger(home, "SELECT prompt FROM groups WHERE place = 'trained' ORDER BY step, id")


def given_up(home):
    return set(in_ledger(home, "SELECT prompt FROM groups WHERE place = 'given_up'"))


def sampled_prompts(sim):
    """The prompts that engines were asked for, from their ids."""
    return ["".join(map(chr, r["input_ids"])) for e in sim.engines.values() for r in e.requests]


@pytest.mark.parametrize("killed_after", [1, 3, 4, 7])
@pytest.mark.parametrize("shuffle", ["", "--rollout-shuffle "])
def test_each_prompt_is_trained_once_whenever_the_run_ends(tmp_path, data, killed_after, shuffle):
    """K1, K2: 12 prompts an epoch, 32 draws; every one is trained or open, none skipped, none repeated."""
    flags = FLAGS + shuffle + data(12)
    home = tmp_path / "run"
    go(home, flags, killed_after=killed_after)
    sim = go(home, flags)
    assert_audit_passes(home)
    trained = trained_in(home)
    assert len(trained) == len(set(trained)) == 32
    assert set(range(24)) <= set(trained) | given_up(home), "a prompt of the first epochs was skipped"
    assert sim.state.recovered.lineage == 1


def test_finished_groups_are_trained_without_being_sampled_again(tmp_path, data):
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    go(home, flags, killed_after=3)
    sim = go(home, flags)
    back = sim.state.recovered
    assert len(back.kept) >= 4
    kept = {row.prompt for row, _ in back.kept}
    again = {row.prompt for row in back.again}
    asked = {int(p) for p in sampled_prompts(sim)}
    assert not kept & asked
    assert again <= asked
    assert kept <= set(trained_in(home))
    assert min(asked) == min(again), "what is issued again comes ahead of new prompts"


def test_what_is_newer_than_the_checkpoint_s_weights_is_not_kept(tmp_path, data):
    flags = FLAGS + data(80)
    home = tmp_path / "run"
    go(home, flags, killed_after=7)
    shutil.rmtree(home / "checkpoints" / "step_000006")
    shutil.rmtree(home / "checkpoints" / "step_000004")
    sim = go(home, flags)
    assert sim.begins.step == 2
    assert all(s.newest_version <= sim.begins.version for _, g in sim.state.recovered.kept for s in iter_samples(g))
    assert max(sim.trainer.ages()) <= 2
    assert_audit_passes(home)


def test_admission_after_a_resume_is_that_of_an_uninterrupted_run(tmp_path, data):
    """S1: bound 2, batch 8, resumed at version 100: 24 groups may be outstanding, not 824."""
    flags = (
        "--rollout-batch-size 8 --n-samples-per-prompt 1 --rollout-max-response-len 8 --max-weight-staleness 2 "
        "--async-max-concurrent-samples 2000 --async-data-buffer-capacity-factor 200 --num-rollout 104 --input-key prompt "
    ) + data(50)
    trainer = Counting(step_s=50)
    run_in(tmp_path / "run", flags, source=source_of(flags), trainer=trainer, begins=StartingPoint(99, 100))
    assert trainer.outstanding[0] == max(trainer.outstanding) == 24


def test_kept_groups_count_against_the_credit(tmp_path, data):
    flags = FLAGS + "--async-data-buffer-capacity-factor 9 --async-max-concurrent-samples 400 " + data(80)
    home = tmp_path / "run"
    go(home, flags, killed_after=3)
    trainer = Counting()
    sim = go(home, flags, trainer=trainer)
    assert sim.state.recovered.kept
    assert max(trainer.outstanding) <= 4 * (2 + 1)


def test_given_up_prompts_stay_given_up(tmp_path, data):
    """K4: a gap that was dropped is passed, and not drawn again."""
    flags = FLAGS + "--rollout-retry-budget 0 --rollout-failure-limit 99 " + data(40)
    home = tmp_path / "run"
    fails = lambda payload: Say(3, "abort") if payload["input_ids"] == [ord("2")] else None  # noqa: E731
    run_in(home, flags, FakeEngine(choose=fails, **LENGTHS), source=source_of(flags), killed_after=3)
    go(home, flags)
    assert 2 not in trained_in(home)
    assert audit(home).groups["given_up: aborted"] == 1
    assert_audit_passes(home)


def test_a_run_goes_on_past_the_end_of_an_epoch(tmp_path, data):
    """K5: saved exactly where an epoch of 8 prompts ends."""
    flags = FLAGS.replace("--num-rollout 8", "--num-rollout 4") + data(8)
    home = tmp_path / "run"
    go(home, flags, killed_after=2)
    sim = go(home, flags)
    assert sim.begins.step == 2
    assert sorted(trained_in(home)) == list(range(16))


def test_a_lost_node_is_replaced_by_the_checkpoint(tmp_path, data):
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    go(home, flags, killed_after=5)
    for file in home.glob("ledger.*"):
        file.unlink()
    go(home, flags)
    trained = trained_in(home)
    assert len(trained) == len(set(trained)) == 32
    assert_audit_passes(home)


def test_another_run_may_go_on_from_a_checkpoint(tmp_path, data):
    flags = FLAGS + data(40)
    go(tmp_path / "a", flags, killed_after=5)
    found = find_checkpoint(str(tmp_path / "a"))
    go(tmp_path / "b", flags, begins=StartingPoint(found.step, found.version, found.folder))
    assert len(trained_in(tmp_path / "b")) == 32
    assert_audit_passes(tmp_path / "b")


def test_nothing_is_kept_under_other_settings(tmp_path, data):
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    go(home, flags, killed_after=3)
    found = find_checkpoint(str(home))
    more = flags.replace("--n-samples-per-prompt 2", "--n-samples-per-prompt 3")
    sim = go(home, more, begins=StartingPoint(found.step, found.version, found.folder, keeps_finished=False))
    assert sim.state.recovered.kept == []
    assert all(len(g.samples) == 3 for b in sim.trainer.batches for g in b.groups)
    assert_audit_passes(home)


def test_a_damaged_checkpoint_is_told_with_what_works(tmp_path, data):
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    go(home, flags, killed_after=3)
    (home / "checkpoints" / "step_000002" / "rollouts.json").write_text("{")
    with pytest.raises(SettingsError, match=r"rollouts.json is damaged .* an earlier step"):
        go(home, flags)


def test_a_second_run_in_the_folder_is_refused(tmp_path, data):
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    go(home, flags, killed_after=3)
    held = LedgerFile(home / FILE)
    with pytest.raises(LedgerError, match="another process"):
        go(home, flags)
    held.close()


class Letters(DataSource):
    """A user's source: unnumbered prompts, and a state of its own."""

    saved: ClassVar[dict] = {}

    def __init__(self, args):
        self.at = 0

    def get_samples(self, num_samples):
        groups = [[Sample(prompt=f"letter {self.at + i}") for _ in range(2)] for i in range(num_samples)]
        self.at += num_samples
        return groups

    def save(self, rollout_id):
        self.saved[rollout_id] = self.at

    def load(self, rollout_id=None):
        self.at = self.saved[rollout_id]


@pytest.mark.parametrize("killed_after", [1, 3, 6])
def test_a_source_of_the_user_s_goes_back_with_its_own_state(tmp_path, killed_after):
    home = tmp_path / "run"
    sims = [
        run_in(home, FLAGS, FakeEngine(**LENGTHS), source=Letters(None), killed_after=k) for k in (killed_after, None)
    ]
    assert_audit_passes(home)
    before = [s.prompt for b in sims[0].trainer.batches[: sims[1].begins.step] for g in b.groups for s in g.samples]
    after = [s.prompt for b in sims[1].trainer.batches for g in b.groups for s in g.samples]
    prompts = before[::2] + after[::2]
    assert len(prompts) == len(set(prompts)) == 32


def test_a_function_of_the_user_s_gets_back_what_was_not_trained(tmp_path, data):
    flags = FLAGS.replace("--max-weight-staleness 2 ", "") + data(40) + "--rollout-function-path user.rollout "
    home = tmp_path / "run"

    def rollout(args, rollout_id, source):
        groups = source.get_samples(4)
        for sample in iter_samples([s for g in groups for s in g]):
            sample.submit_version = 1
            sample.append_response([1, 2], [-0.5, -0.5], [])
            sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
        return groups

    async def coroutine(args, rollout_id, source):
        return rollout(args, rollout_id, source)

    with function_registry.temporary("user.rollout", coroutine):
        for killed_after in (3, None):
            settings = settings_of(flags)
            source = RolloutDataSourceWithBuffer(settings.namespace())
            run_in(home, flags + "--one-step-off", source=source, killed_after=killed_after)
    assert sorted(trained_in(home)) == list(range(32))
    assert_audit_passes(home)


def test_the_sampling_seed_of_a_sample_does_not_depend_on_restarts(tmp_path, data):
    """What a killed run samples again is what it would have sampled."""
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    first = go(home, flags, killed_after=1)
    second = go(home, flags)

    def seeds(sim, prompts):
        requests = [r for e in sim.engines.values() for r in e.requests]
        return {r["sampling_params"]["sampling_seed"] for r in requests if chr_of(r) in prompts}

    def chr_of(request):
        return "".join(map(chr, request["input_ids"]))

    again = {str(row.prompt) for row in second.state.recovered.again}
    assert again
    assert seeds(first, again) == seeds(second, again)


def test_a_finished_run_leaves_no_payload_of_trained_groups(tmp_path, data):
    flags = FLAGS + data(40)
    home = tmp_path / "run"
    go(home, flags)
    assert in_ledger(home, "SELECT id FROM payloads JOIN groups USING (id) WHERE place = 'trained'") == []


@pytest.mark.parametrize("version, kept", [(1, True), (None, False), (3, False)])
def test_groups_that_may_hold_tokens_of_later_weights_are_not_kept(tmp_path, version, kept):
    """Going back to version 2; None: nobody tells which weights a token is from."""
    file = LedgerFile(tmp_path / FILE)
    go_back(file, StartingPoint(), bound=None)
    ledger = Ledger(window=1, store=PlaceStore(file))
    sample = Sample(group_index=0, submit_version=1, tokens=[1], reward=1.0)
    sample.append_response([2], [-0.5], [VersionSpan(version, 0, 1)])
    ledger.finish(ledger.issue([sample]), [sample])
    back = go_back(file, StartingPoint(version=2), bound=None)
    file.close()
    assert (len(back.kept), len(back.again)) == ((1, 0) if kept else (0, 1))
