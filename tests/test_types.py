"""Sample: what goes in comes out, and arrays per token always fit."""

import json

import pytest

from miles.types import Sample, VersionSpan, first_sample, iter_samples


class Words:
    def decode(self, ids):
        return " ".join(map(str, ids))


def sampled(*parts):
    sample = Sample(index=3, prompt="p", tokens=[9, 9], label="l", metadata={"k": 1}, routing_key="r", submit_version=1)
    for ids, version in parts:
        sample.append_response(ids, [-0.5] * len(ids), [VersionSpan(version, 0, len(ids))])
    return sample


def test_spans_join_where_the_version_stays_and_labels_follow_them():
    sample = sampled(([1, 2], 1), ([3], 1), ([4], 2))
    assert sample.version_spans == [(1, 0, 3), (2, 3, 4)]
    assert sample.weight_versions == ["1", "2"]
    assert (sample.oldest_version, sample.newest_version) == (1, 2)
    sample.validate()


def test_tool_tokens_belong_to_no_span_and_have_mask_zero():
    sample = sampled(([1, 2], 1))
    sample.append_response([7, 7, 7], [0.0] * 3, [], trainable=False)
    sample.append_response([3], [-0.1], [VersionSpan(1, 0, 1)])
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.version_spans == [(1, 0, 2), (1, 5, 6)]
    assert sample.effective_response_length == 3


def test_retry_clears_everything_generated_and_keeps_identity():
    sample = sampled(([1, 2], 1))
    sample.reward, sample.response, sample.remove_sample, sample.non_generation_time = 1.0, "x", True, 3.0
    sample.reset_for_retry()
    kept = Sample(
        index=3, prompt="p", tokens=[9, 9], label="l", metadata={"k": 1}, routing_key="r", status=Sample.Status.ABORTED
    )
    assert sample == kept


def test_dict_and_back_is_the_same_through_json():
    sample = sampled(([1, 2], 1), ([4], 2))
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    assert Sample.from_dict({"index": 1, "something_new": 5}).something_new == 5


def test_stripping_tokens_strips_all_that_belongs_to_them():
    sample = sampled(([1, 2], 1), ([4], 2))
    sample.strip_last_output_tokens(2, Words())
    assert (sample.tokens, sample.response, sample.response_length) == ([9, 9, 1], "1", 1)
    assert sample.version_spans == [(1, 0, 1)] and sample.weight_versions == ["1"]
    sample.validate()


def test_unequal_arrays_are_refused():
    with pytest.raises(ValueError, match="2 token ids but 1 log-probs"):
        sampled().append_response([1, 2], [-0.5], [])
    sample = sampled(([1, 2], 1))
    sample.loss_mask = [1]
    with pytest.raises(ValueError, match="loss_mask has 1 entries for 2"):
        sample.validate()


def test_labels_that_are_no_number_say_nothing():
    sample = Sample(weight_versions=["default", "4", "10"], submit_version=2)
    assert sample.oldest_weight_version == 4
    assert sample.oldest_version == 2


@pytest.mark.parametrize(
    ("labels", "submitted", "oldest"),
    [(["2"], 1, 1), (["1", "2"], 1, 1), (["2", "3"], None, 2), ([], 4, 4), ([], None, None)],
)
def test_a_label_of_a_replys_end_makes_no_sample_younger_than_its_submission(labels, submitted, oldest):
    """S6: submitted at 1, weights 2 during generation, and the reply says 2 alone."""
    assert Sample(weight_versions=labels, submit_version=submitted).oldest_version == oldest


def test_meta_info_sets_status_version_and_counters():
    sample = Sample()
    sample.update_from_meta_info(None, {"weight_version": 7, "finish_reason": {"type": "length"}, "prompt_tokens": 5})
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.weight_versions == ["7"]
    assert sample.prefix_cache_info.total_prompt_tokens == 5


def test_groups_may_hold_compact_siblings():
    a, b, c = Sample(index=0), Sample(index=1), Sample(index=2)
    assert list(iter_samples([[a, b], c])) == [a, b, c]
    assert first_sample([[a, b], c]) is a
