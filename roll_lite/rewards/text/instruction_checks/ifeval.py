"""IFEval: its 25 constraints, by id. Arguments have the data set's names and spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from roll_lite.rewards.text.instruction_checks.arguments import holds, phrase, phrases, whole
from roll_lite.rewards.text.instruction_checks.parts import count_sentences, whole_words

FENCES = ("```json", "```Json", "```JSON", "```")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


# ---------------------------------------------------------------- keywords


def existence(response: str, *, keywords: list[str]) -> bool:
    return all(occurrences(keyword, response) for keyword in phrases("keywords", "a keyword", keywords))


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return holds(occurrences(keyword, response), relation, frequency)


def forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    return not any(whole_words(word, response) for word in phrases("forbidden_words", "a forbidden word", forbidden_words))


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return holds(response.lower().count(one_letter(letter).lower()), let_relation, let_frequency)


def one_letter(letter: str) -> str:
    if len(phrase("letter", letter)) != 1:
        raise ValueError(f"letter must be one character, got {letter!r}")
    return letter


def occurrences(keyword: str, response: str) -> int:
    """Number of occurrences, also within longer words."""
    return len(re.findall(re.escape(phrase("a keyword", keyword)), response, re.IGNORECASE))


# ---------------------------------------------------------------- language


def is_language(response: str, language: str, *, without_letters: bool) -> bool:
    """True if the response is in the language. `without_letters`: result for a text without letters; True in IFEval's original."""
    detector = _detector()
    try:
        return str(detector.detect(response)) == language
    except detector.LangDetectException:
        return without_letters


@lru_cache(maxsize=1)
def _detector() -> Any:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # the same verdict every time
    return langdetect


# ---------------------------------------------------------------- length


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are separated by ***."""
    number = whole(num_paragraphs)
    parts = re.split(r"\s?\*\*\*\s?", response)
    inner = parts[1:-1]
    return all(part.strip() for part in inner) and sum(bool(part.strip()) for part in parts) == number


def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by two line breaks."""
    wanted, number, place = phrase("first_word", first_word).lower(), whole(num_paragraphs), whole(nth_paragraph, least=1)
    paragraphs = response.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != number or place > count:
        return False
    words = paragraphs[place - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == wanted


# ---------------------------------------------------------------- content and format


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= whole(num_placeholders)


def postscript(response: str, *, postscript_marker: str) -> bool:
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = phrase("postscript_marker", postscript_marker)
    return re.search(known.get(marker, re.escape(marker.lower())), response.lower()) is not None


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", response, re.MULTILINE)
    return len(stars) + len(dashes) == whole(num_bullets)


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*[^\n*]*\*", response)
    double = re.findall(r"\*\*[^\n*]*\*\*", response)
    return sum(bool(part.strip("*").strip()) for part in [*single, *double]) >= whole(num_highlights)


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(phrase('section_spliter', section_spliter))}\s?\d+\s?", response)) >= whole(num_sections)


def json_format(response: str) -> bool:
    text = response.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("<> \t\r") for line in response.split("\n"))


# ---------------------------------------------------------------- combinations, ends, case, punctuation


def two_responses(response: str) -> bool:
    parts = response.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(phrase("prompt_to_repeat", prompt_to_repeat).lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(phrase("end_phrase", end_phrase).lower())


def quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_words(response: str) -> int:
    return sum(word.isupper() for word in re.findall(r"\w+(?:['’-]\w+)*", response))


def english_capital(response: str) -> bool:
    return response.isupper() and is_language(response, "en", without_letters=True)


def english_lowercase(response: str) -> bool:
    return response.islower() and is_language(response, "en", without_letters=True)


def no_comma(response: str) -> bool:
    return "," not in response


IFEVAL: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": lambda response, language: is_language(response, phrase("language", language), without_letters=True),
    "length_constraints:number_sentences": lambda response, num_sentences, relation: holds(
        count_sentences(response), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": lambda response, num_words, relation: holds(len(re.findall(r"\w+", response)), relation, num_words),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": lambda response: any(option in response for option in CONSTRAINED),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: holds(
        capital_words(response), capital_relation, capital_frequency
    ),
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
