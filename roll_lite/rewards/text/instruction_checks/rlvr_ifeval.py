"""RLVR-IFEval (AllenAI): constraints by the names and arguments of its functions, mostly IFEval's. "N times" is exact."""

from __future__ import annotations

import re
from collections.abc import Callable

from roll_lite.rewards.text.instruction_checks import ifeval
from roll_lite.rewards.text.instruction_checks.arguments import options as options_of
from roll_lite.rewards.text.instruction_checks.arguments import phrase, phrases, quantified, whole
from roll_lite.rewards.text.instruction_checks.parts import count_sentences, whole_words

SENTENCES_OFF = 1
"""Tolerance of "around" a number of sentences."""


def validate_forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    """Forbids words also as parts of longer words."""
    text = response.lower()
    return not any(word.lower() in text for word in phrases("forbidden_words", "a forbidden word", forbidden_words))


def verify_paragraph_count(response: str, *, N: int) -> bool:
    """Paragraphs are separated by * * *, and none is empty."""
    number = whole(N)
    parts = response.split("* * *")
    return len(parts) == number and all(part.strip() for part in parts)


def validate_paragraphs(response: str, *, N: int, first_word: str, i: int) -> bool:
    """Paragraphs are separated by two line breaks."""
    number, place, wanted = whole(N, least=1), whole(i, least=1), phrase("first_word", first_word)
    if place > number:
        raise ValueError(f"there is no paragraph {place} of {number}")
    parts = response.strip().split("\n\n")
    return len(parts) == number and re.match(rf"\s*{re.escape(wanted)}(?!\w)", parts[place - 1]) is not None


def verify_postscript(response: str, *, postscript_marker: str) -> bool:
    """Text must follow the marker."""
    _, found, rest = response.partition(phrase("postscript_marker", postscript_marker))
    return bool(found and rest.strip())


RLVR_IFEVAL: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda response, keyword_list: ifeval.existence(response, keywords=keyword_list),
    "verify_keyword_frequency": lambda response, word, N: whole_words(phrase("word", word), response) == whole(N),
    "validate_forbidden_words": validate_forbidden_words,
    # Case matters.
    "verify_letter_frequency": lambda response, letter, N: response.count(ifeval.one_letter(letter)) == whole(N),
    "validate_response_language": lambda response, language: ifeval.is_language(
        response, phrase("language", language), without_letters=False
    ),
    "verify_paragraph_count": verify_paragraph_count,
    "validate_word_constraint": lambda response, N, quantifier: quantified(len(response.split()), quantifier, N),
    "verify_sentence_constraint": lambda response, N, quantifier: quantified(
        count_sentences(response), quantifier, whole(N), SENTENCES_OFF
    ),
    "validate_paragraphs": validate_paragraphs,
    "verify_postscript": verify_postscript,
    "validate_placeholders": lambda response, N: ifeval.number_placeholders(response, num_placeholders=N),
    "verify_bullet_points": lambda response, N: ifeval.number_bullet_lists(response, num_bullets=N),
    "validate_title": ifeval.title,
    # As a whole word, with case: a is not A.
    "validate_choice": lambda response, options: any(
        re.search(rf"(?<!\w){re.escape(option)}(?!\w)", response) for option in options_of(options)
    ),
    "validate_highlighted_sections": lambda response, N: ifeval.number_highlighted_sections(response, num_highlights=N),
    "validate_sections": lambda response, N, section_splitter: ifeval.multiple_sections(
        response.lower(), section_spliter=phrase("section_splitter", section_splitter).lower(), num_sections=N
    ),
    "validate_json_format": ifeval.json_format,
    "validate_repeat_prompt": lambda response, original_prompt: ifeval.repeat_prompt(response, prompt_to_repeat=original_prompt),
    "validate_two_responses": ifeval.two_responses,
    "validate_uppercase": ifeval.english_capital,
    "validate_lowercase": ifeval.english_lowercase,
    "validate_frequency_capital_words": lambda response, N, quantifier: quantified(ifeval.capital_words(response), quantifier, N),
    "validate_end": ifeval.end_checker,
    "validate_quotation": ifeval.quotation,
    "validate_no_commas": ifeval.no_comma,
}
