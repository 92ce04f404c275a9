"""Averages count a rollout once, ages count a token once, and pass@k is a mean over problems."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.errors import RewardFailed
from miles.observe.metrics import (
    category_metrics,
    eval_metrics,
    eval_sets,
    is_looping,
    mean_pass_at_k,
    pass_at_k,
    passrate_metrics,
    rollout_metrics,
)
from miles.types import PrefixCacheInfo, Sample, SpecInfo, Status, VersionSpan


def row(reward: Any = 1.0, length: int = 4, **fields: Any) -> Sample:
    fields = {"status": Status.COMPLETED, "submit_version": 1, **fields}
    return Sample(tokens=[7, 7, *range(100, 100 + length)], response_length=length, reward=reward, **fields)


def metrics_of(*groups: list[Any], version: int = 1, **options: Any) -> dict[str, float]:
    return rollout_metrics(groups, version=version, **{"reward_key": None, "max_response_len": None, **options})


# ---- rewards, per rollout


@pytest.mark.parametrize(
    "group",
    [
        [row(1.0, rollout_id=0), *(row(0.0, rollout_id=1) for _ in range(9))],
        [row(1.0, rollout_id=0), [row(0.0, rollout_id=1) for _ in range(9)]],
        [row(1.0), [row(0.0) for _ in range(9)]],
    ],
    ids=["flat rows that share an id", "compact siblings", "siblings without ids"],
)
def test_rows_of_one_rollout_count_once(group: list[Any]) -> None:
    assert metrics_of(group)["rollout/raw_reward"] == 0.5


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 6)), min_size=1, max_size=8))
def test_splitting_rollouts_into_rows_changes_no_average(rollouts: list[tuple[int, int]]) -> None:
    whole = metrics_of([row(reward, 12, rollout_id=i) for i, (reward, _) in enumerate(rollouts)])
    split = metrics_of(
        [[row(reward, 12 // rows, rollout_id=i)] * rows for i, (reward, rows) in enumerate(rollouts) if 12 % rows == 0]
        + [row(reward, 12, rollout_id=i) for i, (reward, rows) in enumerate(rollouts) if 12 % rows]
    )
    for name in ("rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio"):
        assert split[name] == pytest.approx(whole[name])


def test_rollouts_of_different_groups_are_never_one() -> None:
    assert metrics_of([row(1.0, rollout_id=0)], [row(0.0, rollout_id=0)])["rollout/raw_reward"] == 0.5


def test_unscored_rollout_is_left_out_and_counted() -> None:
    metrics = metrics_of([row(1.0), row(None), row(1.0), row(1.0)])
    assert metrics["rollout/raw_reward"] == 1.0
    assert metrics["rollout/none_reward_ratio"] == 0.25


def test_batch_without_any_reward_has_no_mean() -> None:
    metrics = metrics_of([row(None)])
    assert "rollout/raw_reward" not in metrics
    assert metrics["rollout/none_reward_ratio"] == 1.0


def test_reward_key_picks_from_reward_objects() -> None:
    assert metrics_of([row({"score": 1.0, "acc": 0.0})], reward_key="score")["rollout/raw_reward"] == 1.0


@pytest.mark.parametrize(
    ("key", "said"), [(None, "no --reward-key is set"), ("points", "--reward-key points is not there")]
)
def test_reward_object_without_its_key_names_flag_and_keys(key: str | None, said: str) -> None:
    with pytest.raises(RewardFailed, match=rf"sample 3 .* {said}; its keys: score, acc"):
        metrics_of([row({"score": 1.0, "acc": 0.0}, index=3)], reward_key=key)


def test_no_groups_have_no_metrics() -> None:
    assert metrics_of() == {}


def test_groups_of_one_reward_are_counted_by_it() -> None:
    metrics = metrics_of([row(0), row(0.0)], [row(1), row(1)], [row(1), row(0)], [row(0.5), row(0.5), row(None)])
    counts = {name: value for name, value in metrics.items() if "zero_std" in name}
    assert counts == {
        "rollout/zero_std/count_0": 1,
        "rollout/zero_std/count_0.5": 1,
        "rollout/zero_std/count_1": 1,
        "rollout/zero_std/all_zero_percentage": 25.0,
        "rollout/zero_std/all_one_percentage": 25.0,
    }


def test_lone_rollout_has_no_spread_to_count() -> None:
    assert not any("zero_std" in name for name in metrics_of([row(1.0)], [row(0.0), row(None)]))


# ---- shape


def test_lengths_are_those_of_whole_rollouts() -> None:
    metrics = metrics_of([[row(length=2, rollout_id=0), row(length=3, rollout_id=0)], row(length=9), row(length=7)])
    shape = [metrics[f"rollout/response_len/{name}"] for name in ("mean", "median", "max", "min")]
    assert shape == [7.0, 7.0, 9.0, 5.0]


def test_status_tells_truncation_and_the_cap_only_where_there_is_none() -> None:
    group = [
        row(length=8, status=Status.TRUNCATED),
        row(length=8, status=Status.COMPLETED),
        row(length=8, status=Status.PENDING),
        row(length=7, status=Status.PENDING),
    ]
    assert metrics_of(group, max_response_len=8)["rollout/truncated_ratio"] == 0.5
    assert metrics_of(group)["rollout/truncated_ratio"] == 0.25


@pytest.mark.parametrize(
    ("response", "loops"),
    [
        ([5] * 32, True),
        ([5] * 31, False),
        ([*range(90), *([1, 2, 3] * 11)], True),
        ([*([1, 2, 3] * 11), *range(90)], False),
        ([*range(64)] * 4, True),
        ([*range(64)] * 3, False),
        ([*range(65)] * 4, False),
        ([*range(40)], False),
        ([], False),
    ],
)
def test_response_loops_that_ends_in_one_piece_over_and_over(response: list[int], loops: bool) -> None:
    assert is_looping(Sample(tokens=[5] * 40 + response, response_length=len(response))) is loops


def test_one_looping_row_makes_a_looping_rollout() -> None:
    loop = Sample(tokens=[5] * 40, response_length=40, rollout_id=0, status=Status.COMPLETED)
    assert metrics_of([[loop, row(rollout_id=0)], row(rollout_id=1)])["rollout/repetition_frac"] == 0.5


def test_cache_and_draft_rates_are_over_all_requests() -> None:
    cached = [PrefixCacheInfo(cached_tokens=30, total_prompt_tokens=40), PrefixCacheInfo(0, 60)]
    drafted = [SpecInfo(3, 4, 5, 10), SpecInfo(0, 4, 5, 10)]
    metrics = metrics_of([row(prefix_cache_info=c, spec_info=s) for c, s in zip(cached, drafted, strict=True)])
    assert metrics["rollout/prefix_cache_hit_rate"] == 0.3
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 15
    assert metrics["rollout/spec_accept_rate"] == 3 / 8
    assert metrics["rollout/spec_accept_length"] == 2.0


# ---- versions and ages


def spanned(*spans: tuple[int | None, int], **fields: Any) -> Sample:
    """A row whose response is made of (version, tokens) pieces."""
    sample = row(length=0, **fields)
    for version, tokens in spans:
        sample.append_response([1] * tokens, [0.0] * tokens, [VersionSpan(version, 0, tokens)])
    return sample


def test_version_statistics_are_of_each_rollouts_oldest_version() -> None:
    metrics = metrics_of([spanned((3, 4), (5, 4)), spanned((5, 4))], version=6)
    assert [metrics[f"rollout/weight_version/{name}"] for name in ("mean", "max", "min")] == [4.0, 5.0, 3.0]
    assert metrics["rollout/weight_version/mixed_version_ratio"] == 0.5


def test_label_default_is_no_second_version() -> None:
    metrics = metrics_of([spanned((None, 2), (4, 2), submit_version=4)], version=5)
    assert metrics["rollout/weight_version/mixed_version_ratio"] == 0.0
    assert metrics["rollout/fully_async/age/1"] == 1.0


def test_age_of_a_group_is_that_of_its_oldest_trainable_token() -> None:
    metrics = metrics_of([spanned((3, 1), (5, 7)), spanned((5, 8))], [spanned((6, 8))], version=6)
    assert metrics["rollout/fully_async/avg_staleness"] == 1.5
    assert metrics["rollout/fully_async/max_staleness"] == 3.0


def test_masked_tokens_have_no_age() -> None:
    sample = spanned((1, 4), (5, 4))
    sample.loss_mask = [0] * 4 + [1] * 4
    metrics = metrics_of([sample, spanned((1, 4), remove_sample=True)], version=6)
    assert metrics["rollout/fully_async/max_staleness"] == 1.0
    assert metrics["rollout/fully_async/age/1"] == 1.0
    assert metrics["rollout/trained_tokens"] == 4.0


def test_batch_with_nothing_left_to_train_has_no_age() -> None:
    metrics = metrics_of([row(remove_sample=True)])
    assert metrics["rollout/trained_tokens"] == 0.0
    assert not any("age" in name or "staleness" in name for name in metrics)


def test_submit_version_counts_where_the_engine_said_nothing() -> None:
    labelled = row(submit_version=2, weight_versions=["4"])
    metrics = metrics_of([row(submit_version=2)], [labelled], [spanned((4, 4), submit_version=2)], version=5)
    assert metrics["rollout/fully_async/age/3"] == pytest.approx(2 / 3)
    assert metrics["rollout/fully_async/age/1"] == pytest.approx(1 / 3)


def test_tokens_of_no_known_version_are_shown_as_such() -> None:
    metrics = metrics_of([row(length=6, submit_version=None)], [spanned((4, 2))], version=4)
    assert metrics["rollout/fully_async/age/unknown"] == 0.75
    assert metrics["rollout/fully_async/age/0"] == 0.25
    assert metrics["rollout/fully_async/avg_staleness"] == 0.0


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_age_shares_are_those_of_counting_token_by_token(rows: list[list[tuple[int, list[int]]]]) -> None:
    group, ages = [], []
    for pieces in rows:
        sample = spanned(*((version, len(mask)) for version, mask in pieces))
        sample.loss_mask = [bit for _, mask in pieces for bit in mask]
        group.append(sample)
        ages += [6 - version for version, mask in pieces for bit in mask if bit]
    metrics = metrics_of(group, version=6)
    shown = {int(n.rsplit("/", 1)[1]): share for n, share in metrics.items() if "/age/" in n}
    values, counts = np.unique(np.array(ages, dtype=np.int64), return_counts=True)
    assert shown == pytest.approx(dict(zip(values.tolist(), (counts / max(1, len(ages))).tolist(), strict=True)))
    assert list(shown) == sorted(shown)


# ---- evaluation


def test_pass_at_k_of_the_published_case() -> None:
    assert pass_at_k(n=8, c=2, k=4) == pytest.approx(0.785714, abs=5e-7)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(subset) for subset in subsets]))


@pytest.mark.parametrize(("n", "c", "k"), [(8, 2, 9), (8, 2, 0), (1, 1, 2)])
def test_more_draws_than_samples_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} .*k from 1 to {n} works"):
        pass_at_k(n, c, k)


def test_more_correct_samples_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="9 correct samples of 8"):
        pass_at_k(8, 9, 1)


def test_pass_at_k_is_a_mean_over_problems_not_over_their_sums() -> None:
    assert mean_pass_at_k([(2, 2), (2, 0)], 2) == 0.5
    solved = [[row(1.0)]] * 50 + [[row(0.0)]] * 114
    metrics = eval_metrics("humaneval", solved, reward_key=None)
    assert metrics["eval/humaneval-pass@1"] == pytest.approx(50 / 164)
    assert [name for name in metrics if "pass@" in name] == ["eval/humaneval-pass@1"]


def test_pass_at_k_is_given_for_powers_of_two_that_every_problem_allows() -> None:
    problems = [[row(float(i < 2)) for i in range(8)], [row(0.0) for _ in range(6)] + [row(None)] * 2]
    metrics = eval_metrics("aime", problems, reward_key=None)
    assert [name for name in metrics if "pass@" in name] == [f"eval/aime-pass@{k}" for k in (1, 2, 4)]
    assert metrics["eval/aime-pass@4"] == pytest.approx(0.785714 / 2, abs=1e-6)


def test_unscored_answer_is_no_wrong_answer() -> None:
    metrics = eval_metrics("gsm8k", [[row(1.0)], [row(None)], [row(0.0)], [row(1.0)]], reward_key=None)
    assert metrics["eval/gsm8k"] == pytest.approx(2 / 3)
    assert metrics["eval/gsm8k-none_reward_ratio"] == 0.25
    assert metrics["eval/gsm8k-pass@1"] == pytest.approx(2 / 3)


def test_failing_scores_below_one_do_not_pass() -> None:
    metrics = eval_metrics("dapo", [[row(-1.0), row(0.9), row(1.0), row(-1.0)]], reward_key=None)
    assert metrics["eval/dapo-pass@1"] == 0.25


def test_evaluation_counts_rollouts_and_records_its_version() -> None:
    group = [row(1.0, rollout_id=0), [row(0.0, rollout_id=1) for _ in range(9)]]
    metrics = eval_metrics("swe", [group], reward_key=None)
    assert metrics["eval/swe"] == 0.5
    assert metrics["eval/swe/weight_version/min"] == metrics["eval/swe/weight_version/max"] == 1.0
    assert metrics["eval/swe-truncated_ratio"] == 0.0


def test_evaluation_sets_are_found_by_name_whatever_their_name() -> None:
    names = ["gsm8k-test", "a/b"]
    metrics = {k: v for name in names for k, v in eval_metrics(name, [[row(1.0)]], reward_key=None).items()}
    assert eval_sets([*metrics, "eval/step", "eval/lag_steps", "rollout/truncated_ratio"]) == ["a/b", "gsm8k-test"]


def test_passrate_is_the_mean_over_problems():
    """E5: n = 8, c = 2, k = 4 is 0.785714; a problem that nobody scored counts neither way."""
    groups = [[Sample(reward=float(i < 2)) for i in range(8)], [Sample(reward=0.0) for _ in range(8)], [Sample()]]
    metrics = passrate_metrics(groups, reward_key=None)
    assert list(metrics) == [f"passrate/pass@{k}" for k in (1, 2, 4, 8)]
    assert metrics["passrate/pass@4"] == pytest.approx(0.785714 / 2, abs=1e-6)


def test_a_rollout_is_in_one_category_however_many_rows_it_left():
    """O1, for categories: one rollout of one row against one of nine."""
    one = [Sample(rollout_id=1, reward={"why": "right"})]
    nine = [Sample(rollout_id=2, reward={"why": "late"}) for _ in range(9)]
    groups = [[one, nine], [Sample(reward={"score": 1.0})], [Sample(reward=0.0)]]
    assert category_metrics(groups, "why") == {"rollout/error_cat/late": 0.25, "rollout/error_cat/right": 0.25}
