"""Laws of the rewards that are rules: where each looks for the answer, and what it gives for one."""

import sys
from types import ModuleType

import pytest

from miles.errors import RewardFailed
from miles.rollout.rm_hub import reasoning_gym as reasoning_gym_module
from miles.rollout.rm_hub.math_dapo_utils import INVALID, compute_score
from miles.rollout.rm_hub.rm_types import RM_TYPES, score_in_place


def score(rm_type, response, label="", **metadata):
    return score_in_place(rm_type, response, label, metadata)


# ---- dapo


@pytest.mark.parametrize(("reply", "truth", "pred"), [
    ("Answer: 42", "42", "42"), ("so\nAnswer: $42$", 42, "42"), (r"Answer: \boxed{42}.", "42", "42"),
    ("**Answer:** **42**", "42", "42"), ("answer : x = 42", "42", "42"), ("Answer:\n42", "42.0", "42"),
    ("Answer: 1,234", "1234", "1,234"), ("Answer: 84/2", "42", "84/2"), ("Answer: 42 degrees", "$42$", "42 degrees"),
    ("Answer: −3", "-3", "-3"), ("Answer: 41\nAnswer: 42", "42", "42"), (r"Answer: 42^\circ", "42", r"42^\circ"),
    ("Answer: 42<|im_end|>", "42", "42"), ("Answer: 42</s>\n", "42", "42"), (r"Answer: \$42", "42", "42"),
])  # fmt: skip
def test_dapo_is_right_on_the_last_answer_line(reply, truth, pred):
    assert compute_score(reply, truth) == {"score": 1.0, "acc": True, "pred": pred}


@pytest.mark.parametrize(("reply", "pred"), [
    ("Answer: 41", "41"), ("Answer: -42", "-42"), ("42", INVALID), ("", INVALID), (r"\boxed{42}", INVALID),
    ("Answer: 42\nAnswer: 7", "7"), ("Answer: 42" + "x" * 300, INVALID), ("Answer: 42 or 43", "42 or 43"),
    ("Answer: 42/0", "42/0"), ("Answer: 42 sin x", "42 sin x"),
])  # fmt: skip
def test_dapo_is_wrong_otherwise_and_says_what_it_read(reply, pred):
    assert compute_score(reply, "42") == {"score": -1.0, "acc": False, "pred": pred}


def test_dapo_window_is_300_characters():
    """Its contract, other than verl#7274's general case: every other type searches all of the reply."""
    assert compute_score("Answer: 42" + "\n" + "x" * 289, "42")["acc"]
    assert not compute_score("Answer: 42" + "\n" + "x" * 299, "42")["acc"]


def test_strict_dapo_reads_the_box():
    assert compute_score(r"Answer: 7, \boxed{42}", "42", strict_box_verify=True)["acc"]
    assert compute_score("Answer: 42", "42", strict_box_verify=True)["pred"] == INVALID


@pytest.mark.parametrize("truth", ["1/2", "x", "", "4.5"])
def test_dapo_truth_that_is_no_integer_is_a_fault_of_the_data(truth):
    with pytest.raises(ValueError, match="is no integer"):
        compute_score("Answer: 1", truth)
    with pytest.raises(RewardFailed, match=r"dapo failed: .* is no integer"):
        score("dapo", "Answer: 1", truth)


# ---- replies that think


@pytest.mark.parametrize(("reply", "reward"), [
    (r"<think>\boxed{1}</think>so \boxed{42}", 1.0), (r"hm ###Response \boxed{42}", 1.0),
    (r"reasoning \boxed{1}###Response\boxed{2}###Response\boxed{42}", 1.0),  # THUDM/slime#2116
    (r"a</think>b</think>\boxed{\frac{84}{2}}<|im_end|>", 1.0), (r"a ###Response b </think> \boxed{42}", 1.0),
    (r"The answer is \boxed{42}", 0.0), ("<think>a</think>42", 0.0), (r"</think>\boxed{41}", 0.0),
    (r"\boxed{42}</think> that is it", 0.0),
])  # fmt: skip
def test_deepscaler_wants_a_box_after_the_thinking(reply, reward):
    assert score("deepscaler", reply, "42") == reward


@pytest.mark.parametrize(("reply", "reward"), [
    (r"<|channel>thought 41<channel|>It is \boxed{42}.<turn|>", 1.0), ("The answer is 42<end_of_turn>", 1.0),
    ("<|channel>thought The answer is 42", 0.0), (r"<|channel>thought \boxed{42}<channel|>It is 41.", 0.0),
])  # fmt: skip
def test_gemma_math_leaves_thoughts_out(reply, reward):
    assert score("gemma_math", reply, "42") == reward


# ---- words and letters


@pytest.mark.parametrize(("reply", "label", "reward"), [
    ("The cat sat.", "cat sat", 1.0), ("a cat", "the dog", 0.0), ("cat dog", "cat", 2 / 3), ("", "cat", 0.0),
    ("cat cat dog", "cat cat", 0.8), ("yes", "Yes.", 1.0), ("yes indeed", "yes", 0.0), ("no", "no way", 0.0),
    ("cat<|im_end|>", "cat", 1.0),
])  # fmt: skip
def test_f1_is_that_of_the_words(reply, label, reward):
    assert score("f1", reply, label) == pytest.approx(reward)


CHOICES = ["red", "green", "blue", "A"]


@pytest.mark.parametrize(("reply", "label", "metadata", "reward"), [
    ("The answer is (B)", "B", {}, 1.0), (r"A or B? \boxed{B}<|im_end|>", "b", {}, 1.0), ("Answer: C", "B", {}, 0.0),
    ("(A)</think>so (B).", "B", {}, 1.0), ("The answer is green.", "B", {"choices": CHOICES}, 1.0),
    ("B", "green", {"choices": CHOICES}, 1.0), ("green", "x", {"correct_letter": "B", "choices": CHOICES}, 1.0),
    ("Answer: E", "E", {"valid_letters": ["D", "E"]}, 1.0), ("", "B", {}, 0.0), ("who knows", "B", {}, 0.0),
    ("The answer is (C)", "C", {"choices": {"C": "red", "D": "blue"}}, 1.0), ("blue", "B", {"choices": CHOICES}, 0.0),
])  # fmt: skip
def test_gpqa_compares_the_chosen_letter(reply, label, metadata, reward):
    assert score("gpqa", reply, label, **metadata) == reward


def test_gpqa_label_that_is_no_choice_is_a_fault_of_the_data():
    with pytest.raises(RewardFailed, match="the label 'F' is none of the choices A, B, C, D"):
        score("gpqa", "A", "F")


# ---- coins


def test_random_rewards_are_coins():
    assert {score("random", "x") for _ in range(100)} == {0.0, 1.0}
    by_reply = [score("deterministic_random", str(i), "label") for i in range(64)]
    assert by_reply == [score("deterministic_random", str(i), "label") for i in range(64)]
    assert set(by_reply) == {0.0, 1.0}
    assert by_reply != [score("deterministic_random", str(i), "other") for i in range(64)]


# ---- reasoning-gym


class Problems:
    """What the library makes of a task: problem ``index`` has the answer ``index + start``."""

    def __init__(self, start):
        self.start = start

    def __getitem__(self, index):
        return {"answer": str(index + self.start)}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.25


ENTRY = {"question": "?", "answer": "5", "metadata": {"source_dataset": "tiny"}}


@pytest.fixture
def library(monkeypatch):
    """The library's two functions that are called, with tasks of their own."""
    module = ModuleType("reasoning_gym")
    scorers = {"tiny": lambda answer, entry: 1.0 if answer == entry["answer"] else 0.25}
    module.get_score_answer_fn = scorers.__getitem__
    module.create_dataset = lambda task, start: {"counting": Problems}[task](start)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setattr(reasoning_gym_module, "is_installed", lambda: True)


@pytest.mark.parametrize(("reply", "reward"), [
    ("<answer>4</answer> no <answer> 5 </answer>", 1.0), (r"<think>4</think> \boxed{5}", 1.0), ("hm</think>5<|im_end|>", 1.0),
    ("it is 5", 0.25),
])  # fmt: skip
def test_reasoning_gym_scores_by_the_entrys_own_task(library, reply, reward):
    assert score("reasoning_gym", reply, reasoning_gym=ENTRY) == reward


@pytest.mark.parametrize(("reply", "index", "start", "reward"), [("5", 2, 3, 1.0), ("5", 2, 4, 0.25), ("5", 1, 4, 1.0)])
def test_reasoning_gym_makes_a_named_problem_again(library, reply, index, start, reward):
    named = {"task": "counting", "config": {"start": start}, "index": index}
    assert score("reasoning_gym", reply, reasoning_gym=named) == reward


def test_reasoning_gym_needs_its_entry_and_its_library(library, monkeypatch):
    with pytest.raises(RewardFailed, match=r"has to be .* or an entry with metadata\[.source_dataset.\]"):
        score("reasoning_gym", "5", reasoning_gym={"answer": "5"})
    monkeypatch.setattr(reasoning_gym_module, "is_installed", lambda: False)
    with pytest.raises(RewardFailed, match="reasoning-gym is not installed; pip install"):
        score("reasoning_gym", "5", reasoning_gym=ENTRY)


def test_reasoning_gyms_real_tasks_score_their_own_answers():
    library = pytest.importorskip("reasoning_gym")
    for task in ("chain_sum", "leg_counting", "spell_backward"):
        config = {"seed": 1, "size": 3}
        for index, entry in enumerate(library.create_dataset(task, **config)):
            reply = f"<answer>{entry['answer']}</answer>"
            assert score("reasoning_gym", reply, reasoning_gym=entry) == 1.0
            assert score("reasoning_gym", reply, reasoning_gym={"task": task, "config": config, "index": index}) == 1.0


# ---- boxes


@pytest.mark.parametrize(("rm_type", "label", "metadata"), [
    ("exact_match", "B", {}), ("math", "B", {}), ("f1", "B", {}), ("gpqa", "B", {}), ("gemma_math", "B", {}),
    ("deepscaler", "B", {}), ("ifbench", "", {"instruction_id_list": ["format:no_whitespace"]}),
])  # fmt: skip
def test_every_type_can_score_the_box_alone(rm_type, label, metadata):
    assert score(f"boxed_{rm_type}", r"not A but \boxed{B}", label, **metadata) == 1.0
    assert score(f"boxed_{rm_type}", "B", label, **metadata) == 0.0


def test_boxed_dapo_reads_the_box_wherever_it_is():
    assert score("boxed_dapo", r"\boxed{42}" + "x" * 400, "42")["acc"]
    assert score("boxed_dapo", "Answer: 42", "42")["score"] == -1.0


def test_every_local_type_can_be_loaded():
    for name, kind in RM_TYPES.items():
        if kind.function is not None and not kind.metadata:
            assert score(name, "1", "1") is not None
