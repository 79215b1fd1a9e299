"""What the 25 instructions of IFEval ask for, by the ids and keyword arguments of its data set. Each check tells whether a response
follows one. The arguments carry the data set's names, its spelling included."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from numbers import Integral
from typing import Any

ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Inc|Ltd|Co|Corp|vs|etc|e\.g|i\.e|cf|al|No|Fig|approx|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)|\b[A-Z](?:\.[A-Z])*)\.$",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?:[!?]+|\.+|…|[。！？]+)[\"'”’)\]*_]*(?=\s|$|(?<=[。！？])\S)")
LONGEST_ABBREVIATION = 40
"""Characters in front of its last full stop."""
FENCES = ("```json", "```Json", "```JSON", "```")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _holds(count: int, relation: str, number: int) -> bool:
    _whole(number)
    if relation == "at least":
        return count >= number
    if relation == "less than":
        return count < number
    raise ValueError(f"relation must be 'at least' or 'less than', got {relation!r}")


def _whole(number: Any) -> int:
    """Text is equal to no count."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"a count must be a whole number, got {number!r}")
    return int(number)


# ---------------------------------------------------------------- keywords


def existence(response: str, *, keywords: list[str]) -> bool:
    counts = [_count(keyword, response) for keyword in _list("keywords", keywords)]
    return all(counts)


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _holds(_count(keyword, response), relation, frequency)


def forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    words = [_text("a forbidden word", word) for word in _list("forbidden_words", forbidden_words)]
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE) for word in words)


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    if len(_text("letter", letter)) != 1:
        raise ValueError(f"letter must be one character, got {letter!r}")
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


def _count(keyword: str, response: str) -> int:
    return len(re.findall(re.escape(_text("a keyword", keyword)), response, re.IGNORECASE))


def _list(name: str, value: Any) -> list[Any]:
    """A string would pass for the list of its letters, and an empty list asks for nothing."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list of words, got {value!r}")
    values = list(value)
    if not values:
        raise ValueError(f"{name} must hold at least one word")
    return values


def _text(name: str, value: Any) -> str:
    """The empty text is in every response."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text with something in it, got {value!r}")
    return value


# ---------------------------------------------------------------- language


def response_language(response: str, *, language: str) -> bool:
    return _is_language(response, language)


def _is_language(response: str, language: str) -> bool:
    """A text without letters is in every language, as in the original."""
    detector = _detector()
    try:
        return str(detector.detect(response)) == language
    except detector.LangDetectException:
        return True


@lru_cache(maxsize=1)
def _detector() -> Any:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # the same verdict every time
    return langdetect


# ---------------------------------------------------------------- length


def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    return _holds(count_sentences(response), relation, num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Paragraphs stand between lines of ***."""
    parts = re.split(r"\s?\*\*\*\s?", response)
    inner = parts[1:-1]
    return all(part.strip() for part in inner) and sum(bool(part.strip()) for part in parts) == _whole(num_paragraphs)


def number_words(response: str, *, num_words: int, relation: str) -> bool:
    return _holds(len(re.findall(r"\w+", response)), relation, num_words)


def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs stand between two line breaks."""
    paragraphs = response.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != _whole(num_paragraphs) or not 1 <= nth_paragraph <= count:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == _text("first_word", first_word).lower()


def count_sentences(text: str) -> int:
    """Sentences end with . ! ? and white space, but for the full stops of abbreviations."""
    start = count = 0
    last = len(text.rstrip())
    for end in SENTENCE_END.finditer(text):
        is_full_stop = end[0].startswith((".", "…")) and end.end() < last
        if is_full_stop and ABBREVIATION.search(text[max(start, end.start() - LONGEST_ABBREVIATION) : end.start() + 1]):
            continue
        count += any(character.isalnum() for character in text[start : end.start()])
        start = end.end()
    return count + any(character.isalnum() for character in text[start:])


# ---------------------------------------------------------------- content and format


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= _whole(num_placeholders)


def postscript(response: str, *, postscript_marker: str) -> bool:
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = _text("postscript_marker", postscript_marker).strip()
    return re.search(known.get(marker, re.escape(marker.lower())), response.lower()) is not None


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", response, re.MULTILINE)
    return len(stars) + len(dashes) == _whole(num_bullets)


def constrained_response(response: str) -> bool:
    return any(option in response for option in CONSTRAINED)


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*[^\n*]*\*", response)
    double = re.findall(r"\*\*[^\n*]*\*\*", response)
    return sum(bool(part.strip("*").strip()) for part in [*single, *double]) >= _whole(num_highlights)


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(_text('section_spliter', section_spliter).strip())}\s?\d+\s?", response)) >= _whole(num_sections)


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
    return any(one.strip("<>").strip() for one in re.findall(r"<<[^\n]+>>", response))


# ---------------------------------------------------------------- combinations, ends, case, punctuation


def two_responses(response: str) -> bool:
    parts = response.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(_text("prompt_to_repeat", prompt_to_repeat).strip().lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(_text("end_phrase", end_phrase).strip().lower())


def quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"\w+(?:['’-]\w+)*", response)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    return response.isupper() and _is_language(response, "en")


def english_lowercase(response: str) -> bool:
    return response.islower() and _is_language(response, "en")


def no_comma(response: str) -> bool:
    return "," not in response


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
