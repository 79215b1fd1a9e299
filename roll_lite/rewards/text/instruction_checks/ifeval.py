from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from roll_lite.rewards.text.instruction_checks.parts import every, sentences, whole_words

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
AROUND = 0.1


def satisfies(count: int, relation: str, number: int, off: int | None = None) -> bool:
    off = max(round(number * AROUND), 1) if off is None else off
    around = abs(count - number) <= off
    return {"at least": count >= number, "less than": count < number, "at most": count <= number, "around": around}[relation]


def occurrences(keyword: str, response: str) -> int:
    return len(re.findall(re.escape(keyword), response, re.IGNORECASE))


def existence(response: str, keywords: list[str]) -> bool:
    return all(occurrences(keyword, response) for keyword in keywords)


def is_language(response: str, language: str, *, without_letters: bool) -> bool:
    """True if the response is in `language`. `without_letters`: result for text without letters."""
    detector = _detector()
    try:
        return str(detector.detect(response)) == language
    except detector.LangDetectException:
        return without_letters


@lru_cache(maxsize=1)
def _detector() -> Any:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # deterministic verdicts
    return langdetect


def paragraphs_by_stars(response: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    return sum(map(bool, parts)) == num_paragraphs and all(parts[1:-1])


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = response.split("\n\n")
    if sum(bool(paragraph.strip()) for paragraph in paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == first_word.lower()


def bullets(response: str) -> int:
    return sum(len(re.findall(rf"^[^\S\n]*{mark}.*$", response, re.MULTILINE)) for mark in (r"\*[^*]", "-"))


def highlights(response: str) -> int:
    single, double = re.findall(r"\*[^\n*]*\*", response), re.findall(r"\*\*[^\n*]*\*\*", response)
    return sum(bool(part.strip("*").strip()) for part in [*single, *double])


def placeholders(response: str) -> int:
    return len(re.findall(r"\[[^\[\]\n]*\]", response))


def sections(response: str, splitter: str) -> int:
    return len(re.findall(rf"\s?{re.escape(splitter)}\s?\d+\s?", response))


def json_format(response: str) -> bool:
    text = re.sub(r"\A```(?:json|Json|JSON)?", "", response.strip())
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("<> \t\r") for line in response.split("\n"))


def two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    filled = list(filter(None, parts))
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.lower())


def quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_words(response: str) -> int:
    return sum(word.isupper() for word in re.findall(r"\w+(?:['’-]\w+)*", response))


def english_capital(response: str) -> bool:
    return response.isupper() and is_language(response, "en", without_letters=True)


def english_lowercase(response: str) -> bool:
    return response.islower() and is_language(response, "en", without_letters=True)


def validate_paragraphs(response: str, N: int, first_word: str, i: int) -> bool:
    parts = response.strip().split("\n\n")
    return i <= len(parts) == N and re.match(rf"\s*{re.escape(first_word)}(?!\w)", parts[i - 1]) is not None


def has_postscript(response: str, postscript_marker: str) -> bool:
    return re.search(POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower())), response.lower()) is not None


IFEVAL: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": lambda response, keyword, frequency, relation: satisfies(occurrences(keyword, response), relation, frequency),
    "keywords:forbidden_words": lambda response, forbidden_words: not any(whole_words(word, response) for word in forbidden_words),
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation: satisfies(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda response, language: is_language(response, language, without_letters=True),
    "length_constraints:number_sentences": lambda response, num_sentences, relation: satisfies(
        len(sentences(response)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": paragraphs_by_stars,
    "length_constraints:number_words": lambda response, num_words, relation: satisfies(
        len(re.findall(r"\w+", response)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda response, num_placeholders: placeholders(response) >= num_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": lambda response, num_bullets: bullets(response) == num_bullets,
    "detectable_format:constrained_response": lambda response: any(option in response for option in CONSTRAINED),
    "detectable_format:number_highlighted_sections": lambda response, num_highlights: highlights(response) >= num_highlights,
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        sections(response, section_spliter) >= num_sections
    ),
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: satisfies(
        capital_words(response), capital_relation, capital_frequency
    ),
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": lambda response: "," not in response,
}

RLVR_IFEVAL: dict[str, Callable[..., bool]] = {
    # "N times" means exactly N in these instructions.
    "verify_keywords": lambda response, keyword_list: existence(response, keyword_list),
    "verify_keyword_frequency": lambda response, word, N: whole_words(word, response) == N,
    # Forbidden also inside longer words.
    "validate_forbidden_words": lambda response, forbidden_words: not any(word.lower() in response.lower() for word in forbidden_words),
    # Case matters.
    "verify_letter_frequency": lambda response, letter, N: response.count(letter) == N,
    "validate_response_language": lambda response, language: is_language(response, language, without_letters=False),
    # Paragraphs are separated by * * *, and none is empty.
    "verify_paragraph_count": lambda response, N: len(response.split("* * *")) == N and every(response.split("* * *"), str.strip),
    "validate_word_constraint": lambda response, N, quantifier: satisfies(len(response.split()), quantifier, N),
    "verify_sentence_constraint": lambda response, N, quantifier: satisfies(len(sentences(response)), quantifier, N, off=1),
    "validate_paragraphs": validate_paragraphs,
    # Text must follow the marker.
    "verify_postscript": lambda response, postscript_marker: bool(response.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda response, N: placeholders(response) >= N,
    "verify_bullet_points": lambda response, N: bullets(response) == N,
    "validate_title": title,
    # Whole words, case-sensitive: a is not A.
    "validate_choice": lambda response, options: any(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", response) for option in options),
    "validate_highlighted_sections": lambda response, N: highlights(response) >= N,
    "validate_sections": lambda response, N, section_splitter: sections(response.lower(), section_splitter.lower()) >= N,
    "validate_json_format": json_format,
    "validate_repeat_prompt": lambda response, original_prompt: repeat_prompt(response, original_prompt),
    "validate_two_responses": two_responses,
    "validate_uppercase": english_capital,
    "validate_lowercase": english_lowercase,
    "validate_frequency_capital_words": lambda response, N, quantifier: satisfies(capital_words(response), quantifier, N),
    "validate_end": end_checker,
    "validate_quotation": quotation,
    "validate_no_commas": IFEVAL["punctuation:no_comma"],
}
