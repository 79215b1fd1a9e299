"""IF-RLVR (IFTrain): constraints beyond IFEval's. Words are those of `parts`: without punctuation or case."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from roll_lite.rewards.text.instruction_checks import ifeval
from roll_lite.rewards.text.instruction_checks.arguments import holds, one_phrase, phrase, whole
from roll_lite.rewards.text.instruction_checks.parts import sentences, whole_words, words

DIVIDER = re.compile(r"\*\*\*|\* \* \*")
FEWEST_LETTERS = 3
"""Shortest palindrome: I and a do not count."""

# ---------------------------------------------------------------- copies


def repeat_phrase(response: str, *, phrase: str, small_n: int) -> bool:
    """The phrase N times, each time with one word in its middle replaced."""
    wanted, number = _middle(phrase), whole(small_n, least=1)
    found = list(_spans(response, wanted[0], wanted[-1]))
    return len(found) == number and all(
        len(span) == len(wanted) and sum(ours != theirs for ours, theirs in zip(span, wanted, strict=True)) == 1 for span in found
    )


def _middle(value: Any) -> list[str]:
    wanted = phrase("phrase", value).split()
    if len(wanted) < 3:
        raise ValueError(f"phrase must have at least three words, got {value!r}")
    return wanted


def _spans(response: str, first: str, last: str) -> list[list[str]]:
    """Spans within a line, from each `first` to the next `last`."""
    found = []
    for line in response.split("\n"):
        start = line.find(f"{first} ")
        while start >= 0 and (end := line.find(f" {last}", start + len(first) + 1)) >= 0:
            found.append(line[start : end + 1 + len(last)].split())
            start = line.find(f"{first} ", end + 1 + len(last))
    return found


def copy(response: str, *, prompt_to_repeat: str) -> bool:
    return _is_same(response, phrase("prompt_to_repeat", prompt_to_repeat))


def copy_span_idx(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True for either reading: the data's check leaves out the last character, its instruction says "including"."""
    start, end = whole(n_start), whole(n_end, least=1)
    wanted = phrase("what is to be copied", prompt_to_repeat and prompt_to_repeat[start:end])
    return _is_same(response, wanted) or _is_same(response, prompt_to_repeat[start : end + 1])


def copying_multiple(response: str, *, prompt_to_repeat: str, N: int) -> bool:
    wanted, number = phrase("prompt_to_repeat", prompt_to_repeat), whole(N, least=1)
    parts = response.split("******")
    return len(parts) == number and all(_is_same(part, wanted) for part in parts)


def _is_same(response: str, wanted: str) -> bool:
    return response.strip().lower() == wanted.strip().lower()


# ---------------------------------------------------------------- forms


def sentence_hyphens(response: str) -> bool:
    """Sentences joined by hyphens: One.-Two.-Three. A hyphen behind a mark joins two sentences; each piece must be a single sentence."""
    pieces = re.split(r"(?<=[.!?])-", response.strip())
    return all(piece == piece.strip() and len(sentences(piece)) == 1 and not re.search(r"[a-z][.!?][A-Z]", piece) for piece in pieces)


def bigram_wrapping(response: str) -> bool:
    """Pairs of words in << >>; a last word without a partner stands alone."""
    tokens = response.split()
    pairs = list(zip(tokens[::2], tokens[1::2], strict=False))
    return bool(pairs) and all(one[:2] == "<<" and two[-2:] == ">>" and ">>" not in one and "<<" not in two for one, two in pairs)


def two_paragraphs_by_breaks(response: str) -> bool:
    parts = response.strip().split("\n\n")
    return len(parts) == 2 and all(part.strip() for part in parts)


# ---------------------------------------------------------------- words and letters


def no_adjacent_consecutive(response: str) -> bool:
    starts = [word[0] for word in words(response)]
    return not any(ord(two) - ord(one) == 1 for one, two in pairwise(starts))


def count_unique(response: str) -> bool:
    used = words(response)
    return len(used) == len(set(used))


# ---------------------------------------------------------------- places


def first_word_sentences(response: str, *, first_word: Any) -> bool:
    wanted = _words_of("first_word", first_word)
    return all(words(sentence)[: len(wanted)] == wanted for sentence in sentences(response)) and bool(words(response))


def last_word_sentences(response: str, *, last_word: Any) -> bool:
    wanted = _words_of("last_word", last_word)
    return all(words(sentence)[-len(wanted) :] == wanted for sentence in sentences(response)) and bool(words(response))


def first_word_answer(response: str, *, first_word: Any) -> bool:
    wanted = _words_of("first_word", first_word)
    return words(response)[: len(wanted)] == wanted


def last_word_answer(response: str, *, last_word: Any) -> bool:
    wanted = _words_of("last_word", last_word)
    return words(response)[-len(wanted) :] == wanted


def keyword_position(response: str, *, keyword: Any, n: int, m: int) -> bool:
    """The m-th word of the n-th sentence."""
    wanted, sentence, place = _words_of("keyword", keyword), whole(n, least=1), whole(m, least=1)
    said = sentences(response)
    return sentence <= len(said) and words(said[sentence - 1])[place - 1 :][: len(wanted)] == wanted


def start_end(response: str) -> bool:
    """First and last word are equal, and no mark follows."""
    said = words(response)
    return len(said) > 1 and said[0] == said[-1] and response.strip()[-1].isalnum()


def counting_composition(response: str, *, n_sent: int, n_words: int) -> bool:
    """Three paragraphs, with the given numbers of sentences and of words per sentence."""
    sentence_count, word_count = whole(n_sent, least=1), whole(n_words, least=1)
    paragraphs = [sentences(part) for part in DIVIDER.split(response.strip())]
    return len(paragraphs) == 3 and all(
        len(said) == sentence_count and all(len(words(sentence)) == word_count for sentence in said) for said in paragraphs
    )


def _words_of(name: str, value: Any) -> list[str]:
    wanted = words(one_phrase(name, value))
    if not wanted:
        raise ValueError(f"{name} must hold a word, got {value!r}")
    return wanted


IF_TRAIN: dict[str, Callable[..., bool]] = {
    "copy:repeat_phrase": repeat_phrase,
    "copy:copy": copy,
    "copy:copying_simple": copy,
    "copy:copying_multiple": copying_multiple,
    "new:copy_span_idx": copy_span_idx,
    "detectable_format:sentence_hyphens": sentence_hyphens,
    "detectable_format:square_brackets": lambda response: all(
        len(word) > 2 and word[0] == "[" and word[-1] == "]" for word in response.split()
    ),
    "detectable_format:bigram_wrapping": bigram_wrapping,
    "paragraphs:paragraphs": lambda response: ifeval.number_paragraphs(response, num_paragraphs=2),
    "paragraphs:paragraphs2": two_paragraphs_by_breaks,
    "punctuation:punctuation_dot": lambda response: not any(mark in response for mark in ".．。․"),
    "punctuation:punctuation_exclamation": lambda response: not any(mark in response for mark in "!！"),
    "keywords:no_adjacent_consecutive": no_adjacent_consecutive,
    "keywords:word_once": lambda response, keyword: ifeval.occurrences(keyword, response) == 1,
    "keywords:word_count_different_numbers": ifeval.frequency,
    "keywords:exclude_word_harder": lambda response, keyword: not whole_words(phrase("keyword", keyword), response),
    "keywords:palindrome": lambda response: any(len(word) >= FEWEST_LETTERS and word == word[::-1] for word in words(response)),
    "keywords:keyword_specific_position": keyword_position,
    "keywords:start_end": start_end,
    "first_word:first_word_sent": first_word_sentences,
    "first_word:first_word_answer": first_word_answer,
    "last_word:last_word_sent": last_word_sentences,
    "last_word:last_word_answer": last_word_answer,
    # At most N lower-case words.
    "count:lowercase_counting": lambda response, N: sum(run.islower() for run in re.findall(r"[^\W\d_]+", response)) <= whole(N),
    "count:counting_composition": counting_composition,
    "count:count_unique": count_unique,
    "count:count_increment_word": lambda response, keyword1, keyword2: (
        (ifeval.occurrences(keyword1, response), ifeval.occurrences(keyword2, response)) == (1, 2)
    ),
    "letters:letter_counting": lambda response, N, relation: holds(sum(character.isalpha() for character in response), relation, N),
    "letters:letter_counting2": ifeval.letter_frequency,
}
