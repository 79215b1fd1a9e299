"""IFBench: constraints on words, sentences and their counts. Words are those of `parts`: without punctuation or case."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from itertools import groupby, pairwise

from roll_lite.rewards.text.instruction_checks.arguments import phrase, share, whole
from roll_lite.rewards.text.instruction_checks.english import CONJUNCTIONS, NAMES, PRONOUNS, STOP_WORDS, is_verb
from roll_lite.rewards.text.instruction_checks.if_train import keyword_position
from roll_lite.rewards.text.instruction_checks.parts import end_mark, plain, sentences, syllables, whole_words, words

CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
OVERLAP_OFF = 2
"""Tolerance in percentage points."""
PRIMES = {number for number in range(2, 100) if all(number % divisor for divisor in range(2, number))}
KEYWORD_TIMES = (1, 2, 3, 5, 7)
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

# ---------------------------------------------------------------- counts


def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    fewest, most = whole(min_words), whole(max_words)
    return fewest <= len(re.findall(r"\w+", response)) <= most


def punctuation(response: str) -> bool:
    """An interrobang and every one of . , ! ? ; : besides it."""
    mark = next((mark for mark in ("?!", "!?", "‽") if mark in response), None)
    return mark is not None and all(one in response.replace(mark, "", 1) for one in ".,!?;:")


def keywords_multiple(response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    """Keywords occur once, twice, three, five and seven times."""
    keywords = [phrase("a keyword", keyword) for keyword in (keyword1, keyword2, keyword3, keyword4, keyword5)]
    return all(whole_words(keyword, response) == times for keyword, times in zip(keywords, KEYWORD_TIMES, strict=True))


def words_japanese(response: str, *, N: int) -> bool:
    """Japanese in every N-th word, except bare numbers and marks; at least one."""
    every = whole(N, least=1)
    asked = [token for token in response.split()[every - 1 :: every] if words(token) and not token.isdigit()]
    return bool(asked) and all(JAPANESE.search(token) for token in asked)


# ---------------------------------------------------------------- ratios


def stop_words(response: str, *, percentage: float) -> bool:
    most, runs = share(percentage), re.findall(r"\w+", response.lower())
    return bool(runs) and 100 * sum(run in STOP_WORDS for run in runs) <= most * len(runs)


def sentence_type(response: str) -> bool:
    """Two statements for each question."""
    marks = Counter(end_mark(sentence) for sentence in sentences(response))
    return marks["?"] > 0 and marks["."] == 2 * marks["?"]


def sentence_balance(response: str) -> bool:
    """Equal numbers of statements, questions and exclamations."""
    marks = Counter(end_mark(sentence) for sentence in sentences(response))
    return 0 < marks["."] == marks["?"] == marks["!"]


def sentence_words(response: str) -> bool:
    """Three sentences of the same length, and no repeated word."""
    said, used = sentences(response), words(response)
    return len(said) == 3 and len({len(sentence) for sentence in said}) == 1 and len(used) == len(set(used))


def overlap(response: str, *, reference_text: str, percentage: float) -> bool:
    """Share of the response's character trigrams that occur in the reference, within the tolerance. IFBench uses characters, too."""
    wanted, ours, theirs = share(percentage), _trigrams(response), _trigrams(phrase("reference_text", reference_text))
    return bool(ours) and abs(100 * len(ours & theirs) / len(ours) - wanted) <= OVERLAP_OFF


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


# ---------------------------------------------------------------- words


def alphabet(response: str) -> bool:
    """First letters of the words follow the alphabet, with a after z."""
    starts = [ord(word[0]) - ord("a") for word in words(response)]
    is_next = all((one + 1) % 26 == two for one, two in pairwise(starts))
    return bool(starts) and is_next and all(0 <= start < 26 for start in starts)


def vowel(response: str) -> bool:
    """A single paragraph with at most three different vowels."""
    text = plain(response.strip().lower())
    return "\n" not in text and bool(words(text)) and len(set(text) & set("aeiou")) <= 3


def consonants(response: str) -> bool:
    """Two adjacent consonants in every word."""
    said = words(response)
    return bool(said) and all(CONSONANTS.search(word) for word in said)


def prime_lengths(response: str) -> bool:
    said = words(response)
    return bool(said) and all(len(word) in PRIMES for word in said)


def start_verb(response: str) -> bool:
    said = words(response)
    return bool(said) and is_verb(said[0])


def repeats(response: str, *, small_n: int) -> bool:
    most = whole(small_n)
    return all(count <= most for count in Counter(words(response)).values())


def odd_even_syllables(response: str) -> bool:
    odd = [syllables(word) % 2 for word in words(response)]
    return all(one != two for one, two in pairwise(odd))


def last_first(response: str) -> bool:
    """Every sentence begins with the previous one's last word; at least two sentences."""
    said = [words(sentence) for sentence in sentences(response)]
    return len(said) > 1 and all(one[-1] == two[0] for one, two in pairwise(said))


def paragraph_last_first(response: str) -> bool:
    """Lines end with their first word and have at least two words."""
    lines = [line for line in map(words, response.split("\n")) if line]
    return bool(lines) and all(len(line) > 1 and line[0] == line[-1] for line in lines)


def no_consecutive(response: str) -> bool:
    """No two adjacent words begin with the same letter."""
    starts = [word[0] for word in words(response)]
    return all(one != two for one, two in pairwise(starts))


def words_position(response: str, *, keyword: str) -> bool:
    """Second and second-to-last word are the keyword."""
    wanted, said = words(phrase("keyword", keyword)), words(response)
    return len(said) > 1 and [said[1]] == [said[-2]] == wanted


# ---------------------------------------------------------------- sentences


def sentence_keyword(response: str, *, word: str, N: int) -> bool:
    """The N-th sentence contains the word."""
    wanted, place, said = phrase("word", word), whole(N, least=1), sentences(response)
    return place <= len(said) and whole_words(wanted, said[place - 1]) > 0


def alliteration_increment(response: str) -> bool:
    """Number of alliterating words (adjacent, same first letter) grows with every sentence; at least two sentences."""
    counts = []
    for sentence in sentences(response):
        runs = [len(list(run)) for _, run in groupby(words(sentence), lambda word: word[0])]
        counts.append(sum(run for run in runs if run > 1))
    return len(counts) > 1 and all(one < two for one, two in pairwise(counts))


def sentence_increment(response: str, *, small_n: int) -> bool:
    """Every sentence has `small_n` more words than the previous one; at least two sentences."""
    more, counts = whole(small_n), [len(words(sentence)) for sentence in sentences(response)]
    return len(counts) > 1 and all(two - one == more for one, two in pairwise(counts))


IFBENCH_WORDS: dict[str, Callable[..., bool]] = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": lambda response, N: len(set(words(response))) >= whole(N),
    "count:conjunctions": lambda response, small_n: len(CONJUNCTIONS.intersection(words(response))) >= whole(small_n),
    "count:person_names": lambda response, N: len(NAMES.intersection(re.findall(r"\w+", response))) >= whole(N),
    # 3.14 and 100,000 count as one number each.
    "count:numbers": lambda response, N: len(re.findall(r"\d+", response.translate(NO_PUNCTUATION))) == whole(N),
    "count:punctuation": punctuation,
    "count:keywords_multiple": keywords_multiple,
    "count:pronouns": lambda response, N: sum(run in PRONOUNS for run in re.findall(r"[^\W\d_]+", response.lower())) >= whole(N),
    "count:words_japanese": words_japanese,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": sentence_words,
    "ratio:overlap": overlap,
    "words:alphabet": alphabet,
    "words:vowel": vowel,
    "words:consonants": consonants,
    # At least ten, of five or more letters.
    "words:palindrome": lambda response: sum(len(word) >= 5 and word == word[::-1] for word in words(response)) >= 10,
    "words:prime_lengths": prime_lengths,
    "words:start_verb": start_verb,
    "words:repeats": repeats,
    "words:odd_even_syllables": odd_even_syllables,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": no_consecutive,
    "words:keywords_specific_position": keyword_position,
    "words:words_position": words_position,
    "sentence:keyword": sentence_keyword,
    "sentence:alliteration_increment": alliteration_increment,
    "sentence:increment": sentence_increment,
}
