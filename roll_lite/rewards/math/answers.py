"""Finds the answer in a response: in a tag or box, after "the answer is", or the last formula."""

from __future__ import annotations

import re
import string
from typing import Literal

from roll_lite.rewards.answer_extraction import HAN, last_boxed, last_boxes, last_tagged, plain_boxes
from roll_lite.rewards.math.equality import sides
from roll_lite.rewards.math.quantities import DELIMITED, NUMERAL, D, is_unit, quantity, unwrapped

Extract = Literal["auto", "boxed", "tagged", "number"]

LONGEST_FORMULA = 2000
SEARCHED = 4000
"""Maximum characters searched for an answer, at the text's end."""
FUNCTIONS = r"(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|log|ln|exp|pi|max|min|gcd|lcm|mod|d[a-z]"
NO_WORDS = re.compile(rf"\\text\{{[^{{}}]*\}}|\\(?:begin|end)\{{[a-z]+\*?\}}|\\[A-Za-z]+|(?<![A-Za-z])(?:{FUNCTIONS})(?![A-Za-z])")
LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])[+-])?{D}(?:/\d+)?(?:\s*\\?%)?")
LABEL = re.compile(r"\A\s*A:\s+(?=\S)")
STATED = re.compile(r"(?:#{4}|\banswer\b[\s*`]*+(?:\bis\b)?[\s*`]*+[:=]?|答案\s*(?:是|为|等于)?\s*[:=]?)[\s*`]*+", re.IGNORECASE)
"""Text that announces an answer: "####" (GSM8K), "the answer is", or 答案是."""
LETTER = rf"(?<![A-Za-z])(?:{FUNCTIONS}|[A-Za-z])(?![A-Za-z])"
GROUP = r"[(\[](?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^()\[\]A-Za-z\n\\$]){1,80}[)\]]"
NUMERALS = r"0[xob][\da-fA-F]+|\d+_\{?\d+\}?"
ATOM = rf"(?:{NUMERALS}|{D}|\\(?!boxed)[A-Za-z]+(?:\{{[^{{}}\n]*\}})*|\\[%$]|{GROUP}|[½⅓⅔¼¾π√∞%$€£]|{LETTER})"
SIGNS = r"(?:[ \t]*[-+*/^=<>_×·÷≤≥≠≈±°!{}|]|(?<=\d)[ ]?:(?=[ ]?\d))+[ \t]*"
RUN = re.compile(
    r"\$\$.+?\$\$|\$(?!\s)[^$\n]*[^$\s\\]\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]"
    rf"|(?<![\w^.])(?<!boxed{{)[-+±({{√$€£]*{ATOM}(?:{SIGNS}(?={ATOM}|\()|{ATOM}|(?<=[\d}}])[ \t]+(?=[\d\\½⅓⅔¼¾]))*[!%°)\]}}]*",
    re.DOTALL,
)
"""Formula in running text: text in math delimiters, or numbers, letters and LaTeX commands joined by operators."""
OR = r"(?:\b(?:or|and|alternatively|maybe|perhaps|possibly|even|else)\b|[或和,;.])"
JOINED = re.compile(rf"[\s*]*(?:[A-Za-z]+\W+(?=or\b))?(?:{OR}[\s,]*)+", re.IGNORECASE)
"""Text that joins two answers, such as "or"."""
DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|other\s+than|rather\s+than|anything\s+but)\b|n['’]t\b|不是|不等于)\s*(?:[a-z]+\s+){0,3}[$(*`]*\Z",
    re.IGNORECASE,
)
CHANGES = re.compile(
    r"\s*(?:[百千万亿]|\(\s*\\?p?mod\b|(?:over|plus|minus|times|divided|out\s+of|thirds?|fifths?|squared|cubed|factorial|to\s+the\b[^.]*\bpower|and\s+an?\s+half"
    r"|(?:in|for|per|each|every)\s+(?:every\s+)?\d+\W*\Z|(?:less|more|fewer|greater|smaller|higher|lower)\s+than\s+(?=[$\\(\d+-]|[b-hj-z]\b))\b)[^\n.]*",
    re.IGNORECASE,
)
"""Text after a number that changes its value: "less than 12" after 5, 万 after 3 (30,000)."""
UNIT_WORD = re.compile(r"\s*(/|[A-Za-z]+|\$|€|£|°)(?:\^\d)?")


def find_answer(response: str, extract: Extract) -> str:
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
    if extract != "auto":
        return _within(last_boxed(response) or "") if extract == "boxed" else ""
    boxes = last_boxes(response)
    return _in_text(response) if not boxes else _within(boxes[0]) if len(boxes) == 1 else ", ".join(box.strip() for box in boxes)


def find_words(response: str, extract: Extract) -> str:
    """Find an answer in words, in the last tag or box, else in the response: the line after "the answer is", else the first line."""
    if extract == "number":
        return ""
    response = plain_boxes(response)
    place = None if extract == "boxed" else last_tagged(response)
    box = last_boxed(response) if place is None and extract != "tagged" else None
    text = place or box or (response if extract == "auto" else "")
    return STATED.split(last_boxed(text) or text)[-1].split("\n")[0].strip()


def words(text: str, shortest: int = 3) -> list[str]:
    """Words of at least `shortest` letters, without LaTeX and functions (sin). Letters in alphabetical order (xyz), which may be a product,
    count only if `shortest` is 2."""
    found = re.findall(rf"[A-Za-z]{{{shortest},}}|[{HAN}]", NO_WORDS.sub(" ", text))
    return [word for word in found if shortest == 2 or (word not in string.ascii_lowercase and word.lower() not in ("and", "for"))]


def is_formula(text: str) -> bool:
    """True if the text is one formula without words, or a number with its unit."""
    plain = unwrapped(text.strip())
    if not plain or len(plain) > LONGEST_FORMULA or "\n" in plain or "#" in plain:
        return False
    is_plain = not (DELIMITED.search(plain) or words(plain, 2))
    return is_plain or quantity(plain) is not None or NUMERAL.fullmatch(plain.lower()) is not None


def _within(text: str) -> str:
    """Find the answer in a box or tag: its only formula, if no word precedes it, or the one after "the answer is"; else the whole
    content."""
    text = text.strip()
    if is_formula(text):
        return text
    sentence = re.sub(r"\([^()]*[A-Za-z]{3}[^()]*\)", "", text)
    runs = _runs(sentence)
    begins_with_it = len(runs) == 1 and not re.search(r"\w", sentence[: runs[0][0]])
    return (_in_text(sentence) if begins_with_it or STATED.search(sentence) else "") or text


def _in_text(text: str) -> str:
    """Find the answer in running text: the formula after "the answer is", else the last one, with others joined to it by "or"."""
    text = text[-SEARCHED:]
    runs = _runs(text)
    stated = [
        run for one in STATED.finditer(text) for run in runs if run[0] >= one.end() and not re.search(r"\w", text[one.end() : run[0]])
    ]
    outside = "".join(text[end:start] for (_, end), (start, _) in zip([(0, 0), *runs], [*runs, (len(text), 0)], strict=True))
    if not stated and not re.search(r"\w", re.sub(r"(?i)\b(?:either|both|and|or)\b", "", outside)):
        stated = runs[:1]
    for start, end in reversed(stated or runs):
        if DENIED.search(text, max(0, start - 60), start):
            continue
        items = [text[start:end]]
        for other, behind in runs:
            if other >= end and JOINED.fullmatch(text, end, other):
                items, end = [*items, text[other:behind]], behind
            elif not stated and behind <= start and re.fullmatch(r"[\s*]*,?\s*(?:or\s+|或)[\s*]*", text[behind:start]):
                items.insert(0, text[other:behind])
        changed = CHANGES.match(text, end)
        suffix = changed[0] if changed else _unit(text[end : end + 100])
        more = re.compile(r"\s*[-+*/^=<>≈±×·÷]\s*[\d(\\$.][^\n]*").match(text, end + len(suffix))
        items[-1] += suffix + (more[0] if more else "")
        different = {without_form(item): item for item in reversed(items)}
        return ", ".join(map(unwrapped, reversed(different.values())))
    return ""


def _runs(text: str) -> list[tuple[int, int]]:
    """(start, end) of each formula and number in running text."""
    runs = []
    for found in RUN.finditer(text):
        start, end = found.span()
        while text[start:end].startswith(("(", "{", "[")) and not _is_balanced(text[start:end]):
            start += 1
        while end > start and (text[end - 1] == "!" or (text[end - 1] in ")]}" and not _is_balanced(text[start:end]))):
            end -= 1
        said = text[start:end].rstrip(" \t*_:=")
        if re.search(r"[\d√π∞\\$]", said) and (not words(said) or is_formula(said)):
            runs.append((start, start + len(said)))
    return runs


def _is_balanced(text: str) -> bool:
    return sum(map(text.count, "([{")) == sum(map(text.count, ")]}"))


def without_form(text: str) -> str:
    """Normalize an answer: 1/2 and 0.5 give the same text, as do 12 cm and 120 mm."""
    found = quantity(sides(text)[-1])
    if found is None:
        return "".join(text.split())
    dimensions, size = found.unit
    return f"{found.value * size} {sorted(dimensions)}" if dimensions else str(found.value)


def _unit(rest: str) -> str:
    """Leading words that name a known unit or a scale such as million."""
    end = place = 0
    while word := UNIT_WORD.match(rest, place):
        place = word.end()
        if word[1] != "/" and not is_unit(word[1]):
            break
        if word[1] not in ("/", "per", "in"):
            end = place
    return rest[:end]
