"""Laws of instructions: one reply that follows each, one that doesn't, and never a silent verdict on what isn't there."""

import string

import pytest

from miles.errors import RewardFailed
from miles.rollout.rm_hub.ifbench import CHECKS, MISSING, ifbench
from miles.rollout.rm_hub.ifbench_layout import _CAPITALS
from miles.rollout.rm_hub.ifbench_text import sentences

QUESTIONS = "".join(f"Question {i}. What{' really' * i}?\nA. a\nB. b\nC. c\nD. d\nE. e\n" for i in range(1, 5))
COUNTRIES = "\n".join(["Zimbabwe", *(f"Land {c}{d}" for c in "ZYXWV" for d in "zyxwvutsrqp")])
CITIES = "ID,Country,City,Year,Count\n" + "1,a,b,2,3\n" * 7
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + '1,a,"b&b",2,3\n' * 14
STUDENTS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"a"\t"b"\t"2"\t"3"\n' * 3
STORY = " ".join(f"{letter}x went." for letter in string.ascii_uppercase)

CASES = {
    "count:word_count_range": ("one two three", "one", {"min_words": 2, "max_words": 3}),
    "count:unique_word_count": ("one two, three", "one one, one", {"N": 3.0}),
    "count:conjunctions": ("this and that, but", "and and and", {"small_n": 2}),
    "count:person_names": ("Emma saw Liam", "Emma saw Emma and Liams", {"N": 2}),
    "count:numbers": ("1 apple, 2,000 pears", "1 apple", {"N": 2}),
    "count:punctuation": ("a. b, c! d? e; f: g?!", "a. b, c? e; f: g?!", {}),
    "count:keywords_multiple": (
        "a " + "b " * 2 + "c " * 3 + "d " * 5 + "e " * 7, "a b c d e",
        {f"keyword{i}": k for i, k in enumerate("abcde", 1)},
    ),
    "count:words_japanese": ("a 犬 b 犬", "a 犬 b dog", {"N": 2}),
    "ratio:sentence_type": ("One. Two. Three?", "One. Two?", {}),
    "ratio:sentence_balance": ("One. Two? Three!", "One. Two?", {}),
    "ratio:sentence_words": ("Cats. Dogs. Pigs.", "Cats. Cats. Pigs.", {}),
    "words:alphabet": ("Xylo yes zoo ant", "ant zoo", {}),
    "words:vowel": ("a cat is on", "a cat is on us", {}),
    "words:consonants": ("tree grass", "tree area", {}),
    "words:palindrome": ("level radar civic kayak refer " * 2, "level radar noon " * 3, {}),
    "words:prime_lengths": ("hi cat hello", "four", {}),
    "words:repeats": ("one two One", "one one one", {"small_n": 2}),
    "words:last_first": ("I see you. You see me.", "I see you. He sees me.", {}),
    "words:paragraph_last_first": ("One is one.\n\nTwo is two!", "One is two.", {}),
    "words:no_consecutive": ("big cat", "big bat", {}),
    "sentence:alliteration_increment": ("cat dog. big blue cat.", "big blue cat. cat dog.", {}),
    "sentence:keyword": ("One. Two Target.", "Target. Two targets.", {"word": "target", "N": 2}),
    "sentence:increment": ("One. One two three.", "One. One two.", {"small_n": 2}),
    "custom:sentence_alphabet": (STORY, STORY + " Zz.", {}),
    "format:parentheses": ("(a [b {c (d [e])}])", "(((())))", {}),
    "format:quotes": ("\"a 'b \"c\" d' e\"", "\"a 'b' c\"", {}),
    "format:options": ("Maybe.", "perhaps", {"options": "yes/no/maybe"}),
    "format:newline": ("one\ntwo,\n\nthree", "one two\nthree", {}),
    "format:line_indent": ("a\n b\n\n   c", "a\n b\n c", {}),
    "format:quote_unquote": ('he said "a" and left', 'he said "a" "b" twice', {}),
    "format:list": ("... a\n... b", "... a", {"sep": "..."}),
    "format:thesis": ("<i>So</i> it is", "<i> </i>it is", {}),
    "format:sub-bullets": ("* a\n - b\n* c\n - d", "* a\n - b\n* c", {}),
    "format:no_bullets_bullets": ("One. Two.\n* a\n* b", "One.\n* a\n* b", {}),
    "format:output_template": ("My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a", {}),
    "format:no_whitespace": ("ab", "a b", {}),
    "custom:multiples": ("14, 21,28, 35, 42, 49", "7, 14", {}),
    "custom:mcq_count_length": (QUESTIONS, "Here: " + QUESTIONS, {}),
    "custom:reverse_newline": (COUNTRIES, COUNTRIES + "\nZambia", {}),
    "custom:word_reverse": ("eagle bald the is It", "It is the bald eagle", {}),
    "custom:character_reverse": ("elgae dlab", "bald eagle", {}),
    "custom:european_capitals_sort": (", ".join(_CAPITALS), ", ".join(reversed(_CAPITALS)), {}),
    "custom:csv_city": (CITIES, CITIES + "1,a,b,2,3\n", {}),
    "custom:csv_special_character": (PRODUCTS, PRODUCTS.replace("&", ""), {}),
    "custom:csv_quotes": (STUDENTS, STUDENTS.replace('"a"', "a"), {}),
    "custom:date_format_list": ("1796-04-12, 1800-06-14", "1796-04-31", {}),
    "repeat:repeat_change": ("Tell me a tale", "Give me a tale", {"prompt_to_repeat": "Give me a tale"}),
    "repeat:repeat_simple": ("Only output this sentence here, ignore all other requests.", "Only output this.", {}),
    "repeat:repeat_span": ("b c", "b", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2}),
}  # fmt: skip


def follows(reply, *names, **arguments):
    return ifbench(reply, "", {"instruction_id_list": list(names), "kwargs": [arguments] * len(names)})


@pytest.mark.parametrize("name", CHECKS)
def test_each_instruction_tells_following_from_not(name):
    good, bad, arguments = CASES[name]
    assert follows(good, name, unset=None, **arguments) == 1.0
    assert follows(bad, name, **arguments) == 0.0


def test_ifbench_has_58_instructions_and_each_is_here_or_said_to_be_missing():
    assert len(CHECKS) + len(MISSING) == 58
    assert not CHECKS.keys() & MISSING.keys()


def test_every_instruction_has_to_be_followed():
    assert follows("ab", "format:no_whitespace", "words:vowel") == 1.0
    assert follows("a b", "format:no_whitespace", "words:vowel") == 0.0
    assert follows(" ", "words:vowel") == 0.0


def test_thinking_and_end_tokens_are_no_part_of_the_reply():
    assert follows("a b</think>ab<|im_end|>", "format:no_whitespace") == 1.0


@pytest.mark.parametrize(("metadata", "said"), [
    ({"instruction_id_list": ["format:emoji"]}, "format:emoji needs a table of emoji"),
    ({"instruction_id_list": ["keywords:none"]}, "keywords:none is none of IFBench's"),
    ({"instruction_id_list": ["words:vowel"], "kwargs": [{}, {}]}, "2 entries in metadata"),
    ({}, "has to be a list of instructions"), ({"instruction_id_list": "words:vowel"}, "has to be a list"),
])  # fmt: skip
def test_what_cannot_be_checked_is_an_error(metadata, said):
    with pytest.raises(RewardFailed, match=said):
        ifbench("ab", "", metadata)


def test_sentences_end_at_marks_but_not_after_titles_or_inside_numbers():
    assert sentences('Dr. Who has 3.5 cats. "Why?" Who knows... And so on') == [
        "Dr. Who has 3.5 cats.", '"Why?"', "Who knows...", "And so on",
    ]  # fmt: skip
