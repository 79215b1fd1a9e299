"""Checks of IF-RLVR (IFTrain) instructions that IFEval lacks. Words (`parts.words`) are lower case, without punctuation."""

from __future__ import annotations

import re
from collections.abc import Callable

from roll_lite.rewards.text.instruction_checks.ifeval import IFEVAL, occurrences, paragraphs_by_stars, satisfies
from roll_lite.rewards.text.instruction_checks.parts import every, neighbours, sentences, whole_words, words

DIVIDER = re.compile(r"\*\*\*|\* \* \*")
FEWEST_LETTERS = 3


def repeat_phrase(response: str, phrase: str, small_n: int) -> bool:
    """Check for exactly `small_n` copies of the phrase, each within one line and with exactly one inner word replaced."""
    wanted = phrase.split()
    if len(wanted) < 3:
        raise ValueError(f"phrase must have at least three words, got {phrase!r}")
    first, last, found = wanted[0], wanted[-1], []
    for line in response.split("\n"):
        start = line.find(f"{first} ")
        while start >= 0 and (end := line.find(f" {last}", start + len(first) + 1)) >= 0:
            found.append(line[start : end + 1 + len(last)].split())
            start = line.find(f"{first} ", end + 1 + len(last))
    return len(found) == small_n and all(
        len(copy) == len(wanted) and sum(ours != theirs for ours, theirs in zip(copy, wanted, strict=True)) == 1 for copy in found
    )


def is_copy(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower() == prompt_to_repeat.strip().lower()


def copies(response: str, prompt_to_repeat: str, N: int) -> bool:
    verdicts = [is_copy(part, prompt_to_repeat) for part in response.split("******")]
    return len(verdicts) == N and all(verdicts)


def copy_span_idx(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Check that the response is the prompt's characters n_start to n_end, ignoring case. The last may be missing, as in the data set's own
    check."""
    return response.strip().lower() in [prompt_to_repeat[n_start:end].strip().lower() for end in (n_end, n_end + 1)]


def sentence_hyphens(response: str) -> bool:
    pieces = re.split(r"(?<=[.!?])-", response.strip())
    return all(piece == piece.strip() and len(sentences(piece)) == 1 and not re.search(r"[a-z][.!?][A-Z]", piece) for piece in pieces)


def bigram_wrapping(response: str) -> bool:
    tokens = response.split()
    pairs = list(zip(tokens[::2], tokens[1::2], strict=False))
    return every(pairs, lambda pair: pair[0][:2] == "<<" and pair[1][-2:] == ">>" and ">>" not in pair[0] and "<<" not in pair[1])


def keyword_position(response: str, keyword: str, n: int, m: int) -> bool:
    wanted, said = words(keyword), sentences(response)
    return n <= len(said) and words(said[n - 1])[m - 1 :][: len(wanted)] == wanted != []


def start_end(response: str) -> bool:
    said = words(response)
    return len(said) > 1 and said[0] == said[-1] and response.strip()[-1].isalnum()


def counting_composition(response: str, n_sent: int, n_words: int) -> bool:
    paragraphs = [sentences(part) for part in DIVIDER.split(response.strip())]
    return len(paragraphs) == 3 and all([len(words(sentence)) for sentence in said] == [n_words] * n_sent for said in paragraphs)


def begin(texts: list[str], first_word: str) -> bool:
    wanted = words(first_word)
    return every(texts, lambda text: words(text)[: len(wanted)] == wanted != [])


def end(texts: list[str], last_word: str) -> bool:
    wanted = words(last_word)
    return every(texts, lambda text: words(text)[-len(wanted) :] == wanted != [])


IF_TRAIN: dict[str, Callable[..., bool]] = {
    "copy:repeat_phrase": repeat_phrase,
    "copy:copy": is_copy,
    "copy:copying_simple": is_copy,
    "copy:copying_multiple": copies,
    "new:copy_span_idx": copy_span_idx,
    "detectable_format:sentence_hyphens": sentence_hyphens,
    "detectable_format:square_brackets": lambda response: all(
        len(word) > 2 and word[0] == "[" and word[-1] == "]" for word in response.split()
    ),
    "detectable_format:bigram_wrapping": bigram_wrapping,
    "paragraphs:paragraphs": lambda response: paragraphs_by_stars(response, 2),
    "paragraphs:paragraphs2": lambda response: [bool(part.strip()) for part in response.strip().split("\n\n")] == [True, True],
    "punctuation:punctuation_dot": lambda response: not any(mark in response for mark in ".．。․"),
    "punctuation:punctuation_exclamation": lambda response: not any(mark in response for mark in "!！"),
    "keywords:no_adjacent_consecutive": lambda response: neighbours(words(response), lambda one, two: ord(two[0]) - ord(one[0]) != 1),
    "keywords:word_once": lambda response, keyword: occurrences(keyword, response) == 1,
    "keywords:word_count_different_numbers": IFEVAL["keywords:frequency"],
    "keywords:exclude_word_harder": lambda response, keyword: not whole_words(keyword, response),
    "keywords:palindrome": lambda response: any(len(word) >= FEWEST_LETTERS and word == word[::-1] for word in words(response)),
    "keywords:keyword_specific_position": keyword_position,
    "keywords:start_end": start_end,
    "first_word:first_word_sent": lambda response, first_word: begin(sentences(response), first_word),
    "first_word:first_word_answer": lambda response, first_word: begin([response], first_word),
    "last_word:last_word_sent": lambda response, last_word: end(sentences(response), last_word),
    "last_word:last_word_answer": lambda response, last_word: end([response], last_word),
    # At most N lower-case words.
    "count:lowercase_counting": lambda response, N: sum(run.islower() for run in re.findall(r"[^\W\d_]+", response)) <= N,
    "count:counting_composition": counting_composition,
    "count:count_unique": lambda response: len(words(response)) == len(set(words(response))),
    "count:count_increment_word": lambda response, keyword1, keyword2: (
        (occurrences(keyword1, response), occurrences(keyword2, response)) == (1, 2)
    ),
    "letters:letter_counting": lambda response, N, relation: satisfies(sum(map(str.isalpha, response)), relation, N),
    "letters:letter_counting2": IFEVAL["keywords:letter_frequency"],
}
