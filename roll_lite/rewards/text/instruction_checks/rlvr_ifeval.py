"""AllenAI's RLVR-IFEval: the constraints of its data by the names and arguments of its functions, most of them IFEval's own. Counts are
exact where it says "N times"."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from roll_lite.rewards.text.instruction_checks import ifeval
from roll_lite.rewards.text.instruction_checks.arguments import options as options_of
from roll_lite.rewards.text.instruction_checks.arguments import phrase, phrases, quantified, whole
from roll_lite.rewards.text.instruction_checks.parts import count_sentences, whole_words

SENTENCES_OFF = 1
"""How far "around" may be from a number of sentences."""


def verify_keywords(response: str, *, keyword_list: list[str]) -> bool:
    return ifeval.existence(response, keywords=keyword_list)


def verify_keyword_frequency(response: str, *, word: str, N: int) -> bool:
    return whole_words(phrase("word", word), response) == whole(N)


def validate_forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    """Not as part of a longer word either."""
    text = response.lower()
    return not any(word.lower() in text for word in phrases("forbidden_words", "a forbidden word", forbidden_words))


def verify_letter_frequency(response: str, *, letter: str, N: int) -> bool:
    """Capitals are letters of their own."""
    return response.count(ifeval.one_letter(letter)) == whole(N)


def validate_response_language(response: str, *, language: str) -> bool:
    return ifeval.is_language(response, phrase("language", language), without_letters=False)


def verify_paragraph_count(response: str, *, N: int) -> bool:
    """Paragraphs stand between * * *, and none is empty."""
    number = whole(N)
    parts = response.split("* * *")
    return len(parts) == number and all(part.strip() for part in parts)


def validate_word_constraint(response: str, *, N: int, quantifier: str) -> bool:
    return quantified(len(response.split()), quantifier, N)


def verify_sentence_constraint(response: str, *, N: int, quantifier: str) -> bool:
    return quantified(count_sentences(response), quantifier, whole(N), SENTENCES_OFF)


def validate_paragraphs(response: str, *, N: int, first_word: str, i: int) -> bool:
    """Paragraphs stand between two line breaks."""
    number, place, wanted = whole(N, least=1), whole(i, least=1), phrase("first_word", first_word)
    if place > number:
        raise ValueError(f"there is no paragraph {place} of {number}")
    parts = response.strip().split("\n\n")
    return len(parts) == number and re.match(rf"\s*{re.escape(wanted)}(?!\w)", parts[place - 1]) is not None


def verify_postscript(response: str, *, postscript_marker: str) -> bool:
    """With something behind the marker."""
    _, found, rest = response.partition(phrase("postscript_marker", postscript_marker))
    return bool(found and rest.strip())


def validate_placeholders(response: str, *, N: int) -> bool:
    return ifeval.number_placeholders(response, num_placeholders=N)


def verify_bullet_points(response: str, *, N: int) -> bool:
    return ifeval.number_bullet_lists(response, num_bullets=N)


def validate_choice(response: str, *, options: str | Sequence[str]) -> bool:
    """Not as part of a longer word, and as it is written: a is not A."""
    return any(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", response) for option in options_of(options))


def validate_highlighted_sections(response: str, *, N: int) -> bool:
    return ifeval.number_highlighted_sections(response, num_highlights=N)


def validate_sections(response: str, *, N: int, section_splitter: str) -> bool:
    return ifeval.multiple_sections(response.lower(), section_spliter=phrase("section_splitter", section_splitter).lower(), num_sections=N)


def validate_repeat_prompt(response: str, *, original_prompt: str) -> bool:
    return ifeval.repeat_prompt(response, prompt_to_repeat=original_prompt)


def validate_frequency_capital_words(response: str, *, N: int, quantifier: str) -> bool:
    return quantified(ifeval.capital_words(response), quantifier, N)


RLVR_IFEVAL: dict[str, Callable[..., bool]] = {
    "verify_keywords": verify_keywords,
    "verify_keyword_frequency": verify_keyword_frequency,
    "validate_forbidden_words": validate_forbidden_words,
    "verify_letter_frequency": verify_letter_frequency,
    "validate_response_language": validate_response_language,
    "verify_paragraph_count": verify_paragraph_count,
    "validate_word_constraint": validate_word_constraint,
    "verify_sentence_constraint": verify_sentence_constraint,
    "validate_paragraphs": validate_paragraphs,
    "verify_postscript": verify_postscript,
    "validate_placeholders": validate_placeholders,
    "verify_bullet_points": verify_bullet_points,
    "validate_title": ifeval.title,
    "validate_choice": validate_choice,
    "validate_highlighted_sections": validate_highlighted_sections,
    "validate_sections": validate_sections,
    "validate_json_format": ifeval.json_format,
    "validate_repeat_prompt": validate_repeat_prompt,
    "validate_two_responses": ifeval.two_responses,
    "validate_uppercase": ifeval.english_capital,
    "validate_lowercase": ifeval.english_lowercase,
    "validate_frequency_capital_words": validate_frequency_capital_words,
    "validate_end": ifeval.end_checker,
    "validate_quotation": ifeval.quotation,
    "validate_no_commas": ifeval.no_comma,
}
