from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

Part = TypeVar("Part")

ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Inc|Ltd|Co|Corp|vs|etc|e\.g|i\.e|cf|al|Fig|approx|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)"
    r"|(?-i:\bNo|(?<![^\s(\"'])[A-Z](?:\.[A-Z])*))\.$",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?:(?<![!?])[!?]+|(?<!\.)\.+|…|(?<![。！？])[。！？]+)[\"'”’)\]*_]*(?=\s|$|(?<=[。！？])\S)")
LONGEST_ABBREVIATION = 40

LATIN = "\\u0000-\\u024f"
UNSEEN = re.compile(f"[\u00ad\u180e\u200b\u2060-\u2064\ufeff]|(?<=[{LATIN}])[\u200c\u200d]|[\u200c\u200d](?=[{LATIN}])")
"""Invisible characters; zero-width joiners only next to Latin letters, as they have a meaning elsewhere."""
BLANKS = str.maketrans(dict.fromkeys("\u115f\u1160\u2800\u3164\uffa0", " "))

MARKS = [chr(code) for code in range(0x10000) if unicodedata.category(chr(code))[0] == "P"]
NO_MARKS = str.maketrans(dict.fromkeys(MARKS, "") | dict.fromkeys("$+<=>^`|~", "") | dict.fromkeys("/–—―", " "))
VOWELS = "aeiouy"


def visible(text: str) -> str:
    return text if text.isascii() else UNSEEN.sub("", text).translate(BLANKS)


def sentences(text: str) -> list[str]:
    """Split a text after . ! ? before white space, except in abbreviations. Parts without letters or digits join the previous sentence."""
    spans: list[tuple[int, int]] = []
    start = 0
    last = len(text.rstrip())

    def close(end: int, next_start: int) -> None:
        nonlocal start
        if any(character.isalnum() for character in text[start:end]):
            spans.append((start, next_start))
        elif spans:
            spans[-1] = (spans[-1][0], next_start)
        start = next_start

    for end in SENTENCE_END.finditer(text):
        is_full_stop = end[0].startswith((".", "…")) and end.end() < last
        if is_full_stop and ABBREVIATION.search(text[max(start, end.start() - LONGEST_ABBREVIATION) : end.start() + 1]):
            continue
        close(end.start(), end.end())
    close(len(text), len(text))
    return [text[one:two].strip() for one, two in spans]


def end_mark(sentence: str) -> str:
    tail = next((place for place in range(len(sentence), 0, -1) if sentence[place - 1].isalnum()), 0)
    return next((character for character in reversed(sentence[tail:]) if character in ".!?"), "")


def words(text: str) -> list[str]:
    """Words of a text in lower case, without punctuation. Hyphens and apostrophes do not split words."""
    return [word for word in text.lower().translate(NO_MARKS).split() if any(character.isalnum() for character in word)]


def whole_words(phrase: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text, re.IGNORECASE))


def plain(text: str) -> str:
    return "".join(character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character))


def syllables(word: str) -> int:
    """Count vowel groups, minus a silent e: a rough rule for English."""
    letters = "".join(character for character in plain(word.lower()) if character.isalpha())
    count = sum(is_vowel for is_vowel, _ in groupby(letters, lambda letter: letter in VOWELS))
    if letters.endswith("e") and not (letters.endswith("le") and letters[-3:-2] not in VOWELS) and letters[-2:-1] not in VOWELS:
        count -= 1
    if letters.endswith(("ed", "es")) and len(letters) > 3 and letters[-3] not in VOWELS:
        count -= not letters.endswith(("ted", "ded", "ses", "zes", "xes", "ches", "shes", "ces", "ges"))
    return max(count, 1)


def every(parts: Sequence[Part], fits: Callable[[Part], object]) -> bool:
    return bool(parts) and all(map(fits, parts))


def neighbours(parts: Sequence[Part], fit: Callable[[Part, Part], object], least: int = 0) -> bool:
    return len(parts) >= least and all(fit(one, two) for one, two in pairwise(parts))
