"""Extraction of the answer: a bare formula, tags, boxes, the place after "the answer is", or the last formula or number."""

from __future__ import annotations

import re
import string
from typing import Any, Literal

from roll_lite.rewards.answer_extraction import HAN, all_boxed, last_boxed, last_boxes, last_tagged, plain_boxes
from roll_lite.rewards.math.equality import DELIMITED, NUMERAL, SEVERAL
from roll_lite.rewards.math.quantities import D, is_unit, quantity, unwrapped

Extract = Literal["auto", "boxed", "tagged", "number"]
Boxes = Literal["last", "all"]

LONGEST_FORMULA = 2000
SEARCHED = 4000
"""Characters at the end of a response that are searched for an answer."""
NO_WORDS = re.compile(
    r"\\text\{[^{}]*\}|\\(?:begin|end)\{[a-z]+\*?\}|\\[A-Za-z]+"
    r"|(?<![A-Za-z])(?:(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|log|ln|exp|pi|max|min|gcd|lcm|mod|d[a-z])(?![A-Za-z])"
)
LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])[+-])?{D}(?:/\d+)?(?:\s*\\?%)?")
LABEL = re.compile(r"\A\s*A:\s+(?=\S)")
STATED = re.compile(r"(?:#{4}|\banswer\b[\s*`]*+(?:\bis\b)?[\s*`]*+[:=]?|答案\s*(?:是|为|等于)?\s*[:=]?)[\s*`]*+", re.IGNORECASE)
"""GSM8K's #### 72, The answer is 72, and the same in Chinese."""
PLAIN = re.compile(r"\S(?:\\[a-z]+\{[^{}\n]*\}|(?!\\[(\[]|\$)\S)*")
TOKEN = re.compile(rf"\$\$.+?\$\$|\$(?!\s)[^$\n]*[^$\s\\]\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]|{PLAIN.pattern}", re.DOTALL)
SPACES = re.compile(
    r"(?<=\S)[ \t]*([=+/^<>≤≥×·÷]|(?<=\d ):(?= \d))[ \t]*(?=\S)|(?<=\S) (\*) (?=\S)"
    rf"|(?<![A-Za-z]{{2}})(?<=[\w)}}\]]) (-) (?=\S)|(?<=[{HAN}])([:=])"
)
JOINED = re.compile(
    r"(?:\s+[a-z]+(?=\W+or\b))?\W*\b(?:or|and|alternatively|maybe|perhaps)\b[\s,]*(?:(?:maybe|perhaps|possibly|even|else)\b[\s,]*)?"
    r"|\s*[或和]\s*",
    re.IGNORECASE,
)
"""Words between several answers."""
LISTED, ENDS, EITHER = re.compile(r"\s*[,;]\s*"), re.compile(r"[^A-Za-z\n.]*(?:[.\n]|\Z)"), re.compile(r",?\s+or\s+|\s*或\s*")
DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|other\s+than|rather\s+than|anything\s+but)\b|n['’]t\b|不是|不等于)\s*(?:[a-z]+\s+){0,3}[$(*`]*\Z",
    re.IGNORECASE,
)
CHANGES = re.compile(
    r"\s*(?:\(\s*\\?p?mod\b.*|(?:over|plus|minus|times|divided|out\s+of|thirds?|fifths?|sixths?|eighths?|squared|cubed|factorial"
    r"|to\s+the\s+\w*\s*power|and\s+(?:an?|one|two|three)\s+(?:half|thirds?|quarters?|fifths?)|(?:in|for|per|each|every)\s+(?:every\s+)?\d+\W*\Z"
    r"|(?:less|more|fewer|greater|smaller|higher|lower)\s+than\s+(?=[$\\(\d+-]|[b-hj-z]\b))\b[^\n.]*)",
    re.IGNORECASE,
)
"""Words behind a number that make another one of it: 5 less than 12, and not 5 less."""
GOES_ON = re.compile(r"\s*[-+*/^=<>≈±×·÷]\s*[\d(\\$.][^\n]*")
UNIT_WORD = re.compile(r"\s*(/|[A-Za-z]+|\$|€|£|°)(?:\^\d)?")


def find_answer(response: str, extract: Extract, boxes: Boxes) -> str:
    """Answer as written in the response; empty if it has none."""
    response = plain_boxes(response)
    if extract == "number":
        return (LAST_NUMBER.findall(response) or [""])[-1]
    if extract == "auto":
        response = LABEL.sub("", response)
        if is_formula(response):
            return response.strip()
    place = last_tagged(response) if extract != "boxed" else None
    if place is not None:
        return _within(last_boxed(place) or place)
    found = [] if extract == "tagged" else list(dict.fromkeys(box.strip() for box in reversed(all_boxed(response))))
    if boxes == "last":
        found = found[-1:] if extract != "auto" else [box.strip() for box in last_boxes(response)]
    if found or extract != "auto":
        return _within(found[0]) if len(found) == 1 else ", ".join(found)
    return _in_text(response)


def find_words(response: str, extract: Extract, boxes: Boxes) -> str:
    """Answer to a reference in words: the content of tags or boxes, or the text after "the answer is"."""
    if extract == "number":
        return ""
    response = plain_boxes(response)
    place = None if extract == "boxed" else last_tagged(response)
    found = [] if place is not None or extract == "tagged" else list(dict.fromkeys(all_boxed(response)))
    text = place or ", ".join(sorted(found[: 1 if boxes == "last" else None])) or (response if extract == "auto" else "")
    return STATED.split(last_boxed(text) or text)[-1].split("\n")[0].strip()


def words(text: str, shortest: int = 3) -> list[str]:
    """Words that are no letters of a product and no names of functions: xyz and sin x have none."""
    found = re.findall(rf"[A-Za-z]{{{shortest},}}|[{HAN}]", NO_WORDS.sub(" ", text))
    return [word for word in found if shortest == 2 or (word not in string.ascii_lowercase and word.lower() not in ("and", "for"))]


def is_formula(text: str) -> bool:
    """True for pure mathematics, without words or delimiters, or a number with its unit."""
    plain = unwrapped(text.strip())
    if not plain or len(plain) > LONGEST_FORMULA or "\n" in plain or "#" in plain:
        return False
    is_plain = not (DELIMITED.search(plain) or words(plain, 2))
    return is_plain or quantity(plain) is not None or NUMERAL.fullmatch(plain.lower()) is not None


def _within(text: str) -> str:
    """Answer in a box or a tag: a formula, or a sentence that begins with one or states the answer."""
    text = LABEL.sub("", text).strip()
    return text if is_formula(text) else _in_text(text, within=True) or text


def _in_text(text: str, within: bool = False) -> str:
    """Answer in running text: the stated one; `within` a box or tag, or in a list, the first formula; else the last formula or number."""
    text = SPACES.sub(lambda one: one[1] or one[2] or one[3] or f"{one[4]} ", text[-SEARCHED:])
    runs = _runs(text)
    said = [run for one in STATED.finditer(text) for run in runs if run[0] >= one.end() and not re.search(r"\w", text[one.end() : run[0]])]
    outside = [text[start:end] for (_, start), (end, _) in zip([(0, 0), *runs], [*runs, (len(text), 0)], strict=True)]
    is_list = all(JOINED.fullmatch(part) or not re.search(r"\w", part) for part in outside[1:])
    if not said and (within or is_list) and not re.search(r"\w", re.sub("(?i)either|both", "", outside[0])):
        said = runs[:1]
    elif not said and within:
        return ""
    for start, end in reversed(said or runs):
        if DENIED.search(text[max(0, start - 60) : start]):
            continue
        items = [text[start:end]]
        for other, behind in runs:
            if (
                said
                and other >= end
                and (JOINED.fullmatch(text, end, other) or (LISTED.fullmatch(text, end, other) and ENDS.match(text, behind)))
            ):
                items, end = [*items, text[other:behind]], behind
            elif not said and behind <= start and EITHER.fullmatch(text, behind, start):
                items.insert(0, text[other:behind])
        changed = CHANGES.match(text, end)
        suffix = changed[0] if changed else _unit(text[end : end + 100])
        more = GOES_ON.match(text, end + len(suffix))
        if within and any(other >= end and SEVERAL.search(text, end, other) for other, _ in runs):
            return ""  # a list that is not read to its end
        items[-1] += suffix + (more[0] if more else "")
        different = {_key(item): item for item in reversed(items)}
        return ", ".join(map(unwrapped, reversed(different.values()))) if len(different) > 1 else items[0]
    return ""


def _runs(text: str) -> list[tuple[int, int]]:
    """Places of formulas and numbers: text between delimiters, and tokens without words."""
    runs: list[tuple[int, int]] = []
    place, is_open = 0, False
    while token := TOKEN.search(text, place):
        said = token[0]
        is_delimited = said[0] in "$\\" and len(said) > 2 and said[-1] in "$)]" and (not words(said) or is_formula(said))
        token = token if is_delimited else PLAIN.match(text, token.start()) or token
        before, place = place, token.end()
        start, end = token.span() if is_delimited else _bare(text, *token.span())
        is_factor = is_open and end - start == 1 and re.search(r"\\[a-z]+\s*\Z", text[runs[-1][0] : start])
        is_part = is_delimited or bool(is_factor) or _is_part(text[start:end])
        if is_part and is_open and "\n" not in text[before:start]:
            runs[-1] = (runs[-1][0], end)
        elif is_part:
            runs.append((start, end))
        is_open = is_part and (end == place or (text[end:place] == "," and _unclosed(text[runs[-1][0] : end]) > 0))
    return [run for run in (_balanced(text, *run) for run in runs) if re.search(r"[\d√π∞\\$]", text[slice(*run)])]


def _bare(text: str, start: int, end: int) -> tuple[int, int]:
    """Strip emphasis, quotes and punctuation around a token, and a name in words before an equals sign."""
    start += len(text[start:end]) - len(text[start:end].lstrip("*`\"'_"))
    end = start + len(text[start:end].rstrip("*`\"'_.,;:!?\\"))
    named = re.match(r"[A-Za-z]{2,}=", text[start:end])
    return start + (named.end() if named else 0), end


def _is_part(token: str) -> bool:
    if not token or "#" in token or "\\boxed" in token or (token.isalpha() and token.isascii()):
        return False
    return not words(token, 2) or is_formula(token)


def _unclosed(text: str) -> int:
    return sum(text.count(one) for one in "([") - sum(text.count(one) for one in ")]")


def _balanced(text: str, start: int, end: int) -> tuple[int, int]:
    """Strip unbalanced brackets and a leading dash."""
    if text[start:end].startswith(("$", "\\(", "\\[")):
        return start, end
    while text[start:end].startswith("- ") or (text[start:end].startswith("(") and _unclosed(text[start:end]) > 0):
        start += 1
    while text[start:end].endswith(")") and _unclosed(text[start:end]) < 0:
        end -= 1
    if _unclosed(text[start:end]) > 0 and "(" in text[start:end]:
        end = start + len(text[start : text.rindex("(", start, end)].rstrip())
    return start, end


def _unit(rest: str) -> str:
    """Words of a known unit, or of a scale such as million, that a text begins with."""
    end = place = 0
    while word := UNIT_WORD.match(rest, place):
        place = word.end()
        if word[1] != "/" and not is_unit(word[1]):
            break
        if word[1] not in ("/", "per", "in") or (word[1] == "in" and not re.match(r"\s*[\w$\\]", rest[place:])):
            end = place
    return rest[:end]


def _key(text: str) -> Any:
    """The same for answers that are the same: 0.5 and 50%."""
    found = quantity(text)
    return (found.value, found.unit) if found is not None else unwrapped(text)
