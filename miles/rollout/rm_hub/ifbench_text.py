"""A reply in, whether its words and sentences are as an IFBench instruction wants them out.

Words are what white space separates, without punctuation. A sentence ends with ``.``, ``!``, ``?`` and white space or the
end, but not after a title such as ``Dr.``; a reply without any is one sentence.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EDGES = string.punctuation + string.whitespace
_TITLES = ("mr.", "mrs.", "ms.", "dr.", "prof.", "st.", "sr.", "jr.", "vs.", "e.g.", "i.e.")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_CONJUNCTIONS = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
_CONSONANT_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, n)))
_NAMES = [
    "Emma", "Liam", "Sophia", "Jackson", "Olivia", "Noah", "Ava", "Lucas", "Isabella", "Mason", "Mia", "Ethan",
    "Charlotte", "Alexander", "Amelia", "Benjamin", "Harper", "Leo", "Zoe", "Daniel", "Chloe", "Samuel", "Lily",
    "Matthew", "Grace", "Owen", "Abigail", "Gabriel", "Ella", "Jacob", "Scarlett", "Nathan", "Victoria", "Elijah",
    "Layla", "Nicholas", "Audrey", "David", "Hannah", "Christopher", "Penelope", "Thomas", "Nora", "Andrew", "Aria",
    "Joseph", "Claire", "Ryan", "Stella", "Jonathan",
]  # fmt: skip


def sentences(text: str) -> list[str]:
    parts, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        sentence = text[start : match.end()].strip()
        if not sentence.lower().endswith(_TITLES):
            parts.append(sentence)
            start = match.end()
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def words(text: str) -> list[str]:
    """Lower-case words; what is nothing but punctuation is none."""
    return text.lower().translate(_NO_PUNCTUATION).split()


def _has_word(text: str, word: str) -> int:
    """How often a word stands in a text, case aside."""
    return len(re.findall(rf"\b{re.escape(word.strip())}\b", text, re.IGNORECASE))


def _ends(text: str) -> Counter[str]:
    """Sentences by their last character."""
    return Counter(sentence[-1] for sentence in sentences(text))


# ---- counts and ratios


def word_count_range(reply: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(re.findall(r"\w+", reply)) <= max_words


def unique_words(reply: str, N: int) -> bool:
    return len({word.strip(_EDGES) for word in reply.lower().split()}) >= N


def conjunctions(reply: str, small_n: int) -> bool:
    return len(_CONJUNCTIONS.intersection(words(reply))) >= small_n


def person_names(reply: str, N: int) -> bool:
    return sum(bool(re.search(rf"\b{name}\b", reply)) for name in _NAMES) >= N


def numbers(reply: str, N: int) -> bool:
    return len(re.findall(r"\d+", reply.translate(_NO_PUNCTUATION))) == N


def punctuation(reply: str) -> bool:
    """Every mark, and an interrobang that doesn't count as one of them."""
    rest = re.sub(r"\?!|!\?|‽", "", reply, count=1)
    return rest != reply and set(".,!?;:") <= set(rest)


def keywords_multiple(
    reply: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:  # fmt: skip
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(_has_word(reply, keyword) == times for keyword, times in wanted)


def japanese_words(reply: str, N: int) -> bool:
    """Every N-th word, numbers aside."""
    every = (word.strip(_EDGES) for word in reply.split()[N - 1 :: N])
    return all(_JAPANESE.search(word) for word in every if word and not word.isdigit())


def declarative_to_interrogative(reply: str) -> bool:
    ends = _ends(reply)
    return ends["."] == 2 * ends["?"]


def sentence_balance(reply: str) -> bool:
    ends = _ends(reply)
    return ends["."] == ends["?"] == ends["!"]


def equal_sentences(reply: str) -> bool:
    """Three sentences of one length in characters, without a word twice."""
    parts = sentences(reply)
    return len(parts) == 3 and len({len(part) for part in parts}) == 1 and max(Counter(words(reply)).values()) == 1


# ---- words


def alphabet(reply: str) -> bool:
    letters = [word[0] for word in words(reply)]
    alphabet = string.ascii_lowercase
    return (
        bool(letters)
        and set(letters) <= set(alphabet)
        and all((alphabet.index(b) - alphabet.index(a)) % 26 == 1 for a, b in pairwise(letters))
    )


def three_vowels(reply: str) -> bool:
    return "\n" not in reply.strip() and len(set("aeiou").intersection(reply.lower())) <= 3


def consonant_clusters(reply: str) -> bool:
    return all(_CONSONANT_CLUSTER.search(word) for word in reply.lower().split())


def palindromes(reply: str) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in words(reply)) >= 10


def prime_lengths(reply: str) -> bool:
    return all(len(word) in _PRIMES for word in words(reply))


def repeats(reply: str, small_n: int) -> bool:
    return max(Counter(words(reply)).values(), default=0) <= small_n


def last_word_first(reply: str) -> bool:
    parts = [words(sentence) for sentence in sentences(reply)]
    return all(a and b and a[-1] == b[0] for a, b in pairwise(parts))


def paragraph_last_first(reply: str) -> bool:
    return all(part[0] == part[-1] for part in map(words, reply.split("\n")) if part)


def no_consecutive_letter(reply: str) -> bool:
    return all(a[0] != b[0] for a, b in pairwise(words(reply)))


# ---- sentences


def alliteration(reply: str) -> bool:
    """Each sentence has more words in alliterating runs than the one before."""
    counts = [_alliterating(sentence) for sentence in sentences(reply)]
    return all(a < b for a, b in pairwise(counts))


def _alliterating(sentence: str) -> int:
    letters = [word[0] for part in sentence.lower().split() if (word := part.lstrip(_EDGES))]
    same = [a == b for a, b in pairwise(letters)]
    return sum(1 if before else 2 for before, now in pairwise([False, *same]) if now)


def keyword_in_sentence(reply: str, word: str, N: int) -> bool:
    parts = sentences(reply)
    return len(parts) >= N and _has_word(parts[N - 1], word) > 0


def word_increment(reply: str, small_n: int) -> bool:
    counts = [len(words(sentence)) for sentence in sentences(reply)]
    return all(b == a + small_n for a, b in pairwise(counts))


def sentence_alphabet(reply: str) -> bool:
    starts = [sentence.lstrip(_EDGES)[:1].lower() for sentence in sentences(reply)]
    return starts == list(string.ascii_lowercase)


CHECKS: dict[str, Callable[..., bool]] = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_words,
    "count:conjunctions": conjunctions,
    "count:person_names": person_names,
    "count:numbers": numbers,
    "count:punctuation": punctuation,
    "count:keywords_multiple": keywords_multiple,
    "count:words_japanese": japanese_words,
    "ratio:sentence_type": declarative_to_interrogative,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": equal_sentences,
    "words:alphabet": alphabet,
    "words:vowel": three_vowels,
    "words:consonants": consonant_clusters,
    "words:palindrome": palindromes,
    "words:prime_lengths": prime_lengths,
    "words:repeats": repeats,
    "words:last_first": last_word_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": no_consecutive_letter,
    "sentence:alliteration_increment": alliteration,
    "sentence:keyword": keyword_in_sentence,
    "sentence:increment": word_increment,
    "custom:sentence_alphabet": sentence_alphabet,
}
