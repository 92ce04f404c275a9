"""Laws of checking answers: every triple that this field has tripped over gets the right verdict, each time."""

import threading

import pytest

from miles.rollout.rm_hub.answers import chosen_letter, final_answer, last_boxed
from miles.rollout.rm_hub.exact_match import exact_match
from miles.rollout.rm_hub.math import math

RIGHT = [
    ("equation in another form", "$y = -1/2*x + 3/4$", "$2x+4y-3=0$"),
    ("radical of a quotient, for n > 0", r"$\frac{1}{\sqrt{n}}$", r"$\sqrt{1/n}$"),
    ("percent in words", "28 percent", r"$28\%$"),
    ("percent sign is optional", "28", r"$28\%$"),
    ("percent as a fraction", r"\boxed{0.28}", r"28\%"),
    ("bare function call", "-1 + exp(16)", "$e^{16} - 1$"),
    ("bare power", "x**2 + 1", "$x^2+1$"),
    ("bare root", "sqrt(x+1)", r"$\sqrt{x+1}$"),
    ("scientific notation", "1e-7", "$10^{-7}$"),
    ("rounded fraction", "0.0833333333333333", r"$\frac{1}{12}$"),
    ("equation times -1", "$-34x-45y+20z-100=0$", "$34x+45y-20z+100=0$"),
    ("last box wins", r"\boxed{41} no wait \boxed{42}", "$42$"),
    ("varnothing", r"\boxed{\varnothing}", r"$\emptyset$"),
    ("empty set in braces", r"\boxed{\{\}}", r"$\emptyset$"),
    ("minus U+2212", "\\boxed{\u22123}", "$-3$"),
    ("bare minus U+2212", "\u22123", "-3"),
    ("letter in parentheses", "The answer is (B)", "$B$"),
    ("letter without", "**Answer: B**", "B"),
    ("boxed letter", r"\boxed{(\text{B})}", "B"),
    ("last letter", "Option (A) is wrong, so (C)", "C"),
    ("variable that looks like a letter", r"\boxed{\frac{2B}{2}}", "B"),
    ("hash line, then text", "#### 18\n... this. 3 cats.", "$18$"),
    ("hash line with its own text", "#### 42" + " filler" * 69, "42"),
    ("hash line, then 480 characters", "#### 42\n" + "y " * 240, "42"),
    ("hash line, 480 characters at once", "#### 42" + "x" * 480, "42"),
    ("negative hash line", "#### -3", "-3"),
    ("hash line with a formula", r"#### \frac{1}{2}", "0.5"),
    ("label is a worked solution", "18", "He pays 9*2=18 dollars.\n#### 18"),
    ("label is a boxed solution", "18", r"so it is $\boxed{18}$."),
    ("markers between boxes", r"reasoning \boxed{1}###Response\boxed{2}###Response\boxed{42}", "42"),
    ("no marker needed", r"The answer is \boxed{42}", "42"),
    ("complete box before a cut one", r"\boxed{2} and \boxed{3", "2"),
    ("nested braces", r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}"),
    ("thousands", r"\boxed{1\,000}", "1,000"),
    ("decimals with a zero", "2.50", "2.5"),
    ("decimal of a fraction", "-1,000.25", r"-\frac{4001}{4}"),
    ("six decimals", "0.1234568", "$0.1234567$"),
    ("word", "The answer is Friday.", "friday"),
    ("boxed word", r"\boxed{\text{Friday}}", "Friday"),
    ("sequence with an ellipsis", r"\boxed{1, 2, \ldots, n}", r"$1, 2, \ldots, n$"),
    ("clock time", "1:00", "$1:00$"),
    ("set in another order", r"$\{1,2\}$", r"$\{2,1\}$"),
    ("pair", "(1, 2)", "$(1,2)$"),
    ("units", r"\boxed{5\text{ cm}}", "5"),
    ("number in a sentence", "So we have 7 pears. The answer is 12 pears", "12"),
    ("stated answer", "**Answer:** 17", "17"),
    ("line end of a completion", "17\n", "17"),
    ("value of a variable", "x = 5", "5"),
    ("variable named in the label", "5", "$x=5$"),
    ("end token", "17<|im_end|>", "17"),
    ("end tokens after a hash line", "#### 18<|im_end|>\n<|endoftext|>", "18"),
    ("end token after a statement", r"The answer is \frac{1}{2}.</s>", "0.5"),
    ("formula in another form", "n(n+1)/2", r"\frac{n^2+n}{2}"),
]

WRONG = [
    ("tiny numbers", r"$\frac{1}{2006!}$", r"$\frac{1}{2004!}$"),
    ("tiny against large", r"$\frac{1}{3 \cdot 2^{2006}}$", r"$\frac{2^{2005}+1}{3 \cdot 2^{2006}}$"),
    ("tiny factor of a variable", r"\boxed{\frac{x}{2006!}}", r"$\frac{x}{2004!}$"),
    ("tiny number in a set", r"\boxed{\{\frac{1}{2006!}, 1\}}", r"\{\frac{1}{2004!}, 1\}"),
    ("another decimal", "2.51", "2.5"),
    ("decimals below the rounding", r"\boxed{0.0000002}", r"\frac{1}{10000000}"),
    ("sequences with an ellipsis", r"$1, 3, 5, \ldots, 2n-1$", r"$1, 2, \ldots, n$"),
    ("values of a variable", "$n=1, 2, 3$", "$n=2, 3, 4$"),
    ("list with words", "$21, 36, and 82$", r"$19, 46, \text{ and } 82$"),
    ("clock times", "$1:00$", "$12:00$"),
    ("another line", "$3x + 4y + 14=0$", "$3x-y+13=0$"),
    ("factor left over", r"$4\sqrt{2}$", "$4$"),
    ("bare pairs", r"(3, \frac{2\pi}{3})", r"\left( 3, \frac{\pi}{2} \right)"),
    ("another ellipse", r"$\frac{x^2}{16}+\frac{y^2}{12}=1$", r"$\frac{x^2}{4}+\frac{y^2}{3}=1$"),
    ("answer taken back", r"\boxed{42} no wait \boxed{41}", "$42$"),
    ("pair in another order", r"\boxed{(2,1)}", "$(1,2)$"),
    ("cut off box", r"\boxed{2", "$2$"),
    ("cut off box, number before it", r"we get 2, so \boxed{ 2", "$2$"),
    ("sign", "#### -3", "3"),
    ("nothing against nothing", "", ""),
    ("nothing", " \n", "5"),
    ("label is nothing", "5", ""),
    ("percent, off by a hundred", r"\boxed{2800}", r"28\%"),
    ("absolute value", "|x|", "x"),
    ("letters of a word", "eys", "yes"),
    ("another letter", "The answer is (A)", "B"),
    ("another word", "The answer is Monday.", "Friday"),
    ("another number", "18\n", "17"),
    ("division by zero", r"\boxed{\frac{1}{0}}", r"\frac{2}{0}"),
]


@pytest.mark.parametrize(("reply", "label"), [pytest.param(r, g, id=name) for name, r, g in RIGHT])
def test_right_answers_are_right(reply, label):
    assert math(reply, label) == 1.0


@pytest.mark.parametrize(("reply", "label"), [pytest.param(r, g, id=name) for name, r, g in WRONG])
def test_wrong_answers_are_wrong(reply, label):
    assert math(reply, label) == 0.0


def test_verdict_is_the_same_outside_the_main_thread():
    """trl#5281, verl#5635: math-verify's own limits raise there."""
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math(r"\boxed{\frac{1}{x}}", r"$\frac{2}{2x}$")))
    thread.start()
    thread.join()
    assert verdicts == [1.0]


@pytest.mark.parametrize(("text", "boxed"), [
    (r"\boxed{1} \fbox{ {2}{3} }", "{2}{3}"), (r"\boxed {a}", "a"), (r"\boxed{}", ""), (r"\boxed{1} \boxed{2", "1"),
    (r"\boxed{1", None), ("boxed{1}", None), ("", None), (r"} { \boxed{\boxed{1}}", "1"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."), (r"\boxed{a \\}", "a \\\\"), (r"\boxed{" * 50_000, None),
])  # fmt: skip
def test_last_complete_box_is_found(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(("text", "answer"), [
    ("#### 28% of it", "28%"), ("#### 42, as said", "42"), ("#### 1,2,3", "1,2,3"),
    ("#### 1,000.50 dollars.", "1,000.50"), ("#### 3/4", "3/4"), ("#### 2x + 1", "2x + 1"), ("#### $5$", "5"),
    ("#### 5 or 7", "5 or 7"), ("#### 7\n#### 8", "8"), ("so the answer is: $x + 1$.", "x + 1"),
    (r"\[ x^2 \]", "x^2"), ("**12**", "12"), ("we think so", None), (r"\boxed{1", ""),
])  # fmt: skip
def test_final_answer_is_found(text, answer):
    assert final_answer(text) == answer


def test_letters_are_found_where_they_are_chosen():
    assert chosen_letter("I choose (D).") == "D"
    assert chosen_letter("A man walks") is None


def test_exact_match_forgives_white_space_around_and_nothing_else():
    assert exact_match(" 12\n", "12") == 1.0
    assert exact_match("1 2", "12") == exact_match("12<eos>", "12") == 0.0
