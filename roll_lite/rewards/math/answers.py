from __future__ import annotations

import re
import string
from typing import Literal

from roll_lite.data.boxes import plain_boxes
from roll_lite.rewards.answer_extraction import HAN, SCRIPTS, last_boxes, last_tagged
from roll_lite.rewards.math.equality import NUMERAL, sides
from roll_lite.rewards.math.quantities import DELIMITED, KNOWN, SCALE, D, quantity, unwrapped

Extract = Literal["auto", "boxed", "tagged", "number"]

LONGEST_FORMULA = 2000
SEARCHED = 4000
FUNCTIONS = r"(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|log|ln|exp|pi|max|min|gcd|lcm|mod|d[a-z]"
NO_WORDS = re.compile(rf"\\text\{{[^{{}}]*\}}|\\(?:begin|end)\{{[a-z]+\*?\}}|\\[A-Za-z]+|(?<![A-Za-z])(?:{FUNCTIONS})(?![A-Za-z])")
NO_FORMULA = re.compile(rf"{DELIMITED.pattern}|\A[A-Z]:\s")
LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])[+-])?{D}(?:/\d+)?(?:\s*\\?%)?")
VERB = (  # to answer 60 questions
    r"(?:(?<=\bto )|(?<=must )|(?<=can )|(?<=could )|(?<=should )|(?<=would )|(?<=will )|(?<=not ))answer\s+\d+(?:[.,]\d+)*\s+"
    r"(?!(?:and|as|because|by|for|from|if|in|or|since|so|which)\b)[a-z]"
)
STATED = re.compile(
    rf"(?:#{{4}}|(?!{VERB})\banswer\b[\s*`]*+(?:\bis\b)?[\s*`]*+[:=]?|答案\s*(?:是|为|等于)?\s*[:=]?)[\s*`]*+", re.IGNORECASE
)
LETTER = rf"(?<![A-Za-z])(?:{FUNCTIONS}|[A-Za-z])(?![A-Za-z])"
GROUP = r"[(\[](?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^()\[\]A-Za-z\n\\$]){1,80}[)\]]"
ATOM = rf"(?:0[xob][\da-fA-F]+|\d+_\{{?\d+\}}?|{D}|\\(?!boxed)[A-Za-z]+(?:\{{[^{{}}\n]*\}})*|\\[%$]|{GROUP}|[½⅓⅔¼¾π√∞%$€£]|{LETTER})"
SIGNS = r"(?:[ \t]*[-+*/^=<>_×·÷≤≥≠≈±°!{}|]|(?<=\d)[ ]?:(?=[ ]?\d))+[ \t]*"
RUN = re.compile(
    r"\$\$.+?\$\$|\$(?!\s)[^$\n]*[^$\s\\]\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]"
    rf"|(?<![\w^.])(?<!boxed{{)[-+±({{√$€£]*{ATOM}(?:{SIGNS}(?={ATOM}|\()|{ATOM}|(?<=[\d}}])[ \t]+(?=[\d\\½⅓⅔¼¾]))*[!%°)\]}}]*",
    re.DOTALL,
)
OR = r"(?:\b(?:or|and|alternatively|maybe|perhaps|possibly|even|else)\b|[或和,;.])"
JOINED = re.compile(rf"[\s*]*(?:[A-Za-z]+\W+(?=or\b))?(?:{OR}[\s,]*)+", re.IGNORECASE)
DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|other\s+than|rather\s+than|anything\s+but)\b|n['’]t\b|не\b|不是|不等于)\s*(?:[a-z]+\s+){0,3}[$(*`]*\Z",
    re.IGNORECASE,
)
FOREIGN = re.compile(rf"(?!\d)[{SCRIPTS}]|[Ͱ-Ͽ]{{4}}")
FOREIGN_SCALE = "или|тыс|млн|млрд|трлн|миллион|миллиард|триллион|в квадрате|в кубе|लाख|करोड़|हज़ार|हजार|ألف|مليون|مليار|พัน|หมื่น|แสน|ล้าน|또는"
CHANGES = re.compile(
    rf"\s*(?:{SCALE}|{FOREIGN_SCALE}|\(\s*\\?p?mod\b|(?:over|plus|minus|times|divided|out\s+of|thirds?|fifths?|squared|cubed|factorial|to\s+the\b[^.]*\bpower|and\s+an?\s+half"
    r"|(?:in|for|per|each|every)\s+(?:every\s+)?\d+\W*\Z|(?:less|more|fewer|greater|smaller|higher|lower)\s+than\s+(?=[$\\(\d+-]|[b-hj-z]\b))\b"
    r"|[-+*/^=<>≈±×·÷]\s*[\d(\\$.])[^\n.]*",
    re.IGNORECASE,
)
"""Text after a number that changes its value: "less than 12" after 5, 万 after 3 (30,000), an operator."""
NAMES = "|".join(map(re.escape, KNOWN))
UNIT = re.compile(rf"(?:(?:\s*(?:{NAMES})(?:s|es)?(?![A-Za-z])(?:\^\d)?)*(?<!\bin)(?<!/)(?<!\bper))?", re.IGNORECASE)


def find_answer(response: str, extract: Extract, in_words: bool = False) -> str:
    """Return the answer in a response, or "". `in_words`: the reference is in words; return text up to its line's end, not a formula."""
    text = plain_boxes(response)
    if extract == "number":
        return "" if in_words else (LAST_NUMBER.findall(text) or [""])[-1]
    tagged = last_tagged(text) if extract != "boxed" else None
    boxes = [] if tagged is None and extract == "tagged" else last_boxes(text if tagged is None else tagged)
    if in_words or extract == "boxed" or tagged is not None:
        boxes = boxes[-1:]
    place = ", ".join(box.strip() for box in boxes) or tagged
    if place is None and extract != "auto":
        return ""
    inside = (text if place is None else place).strip()
    if in_words:
        return STATED.split(inside)[-1].split("\n")[0].strip()
    is_sentence = place is None and FOREIGN.search(NO_WORDS.sub(" ", inside))
    if len(boxes) > 1 or (is_formula(inside) and not is_sentence):
        return inside
    runs = _runs(inside := inside[-SEARCHED:])
    if place is None or STATED.search(inside) or (len(runs) == 1 and not re.search(r"\w", inside[: runs[0][0]])):
        return _in_text(inside, runs) or (place or "").strip()
    return inside


def _in_text(text: str, runs: list[tuple[int, int]]) -> str:
    """Return the formula after "the answer is", else the last one, with formulas joined to it by "or". `runs`: (start, end) of each
    formula."""
    stated = [
        run for one in STATED.finditer(text) for run in runs if run[0] >= one.end() and not re.search(r"\w", text[one.end() : run[0]])
    ]
    between = "".join(text[end:start] for (_, end), (start, _) in zip([(0, 0), *runs], [*runs, (len(text), 0)], strict=True))
    if not stated and not re.search(r"\w", re.sub(r"(?i)\b(?:either|both|and|or)\b", "", between)):
        stated = runs[:1]
    allowed = [run for run in stated or runs if not DENIED.search(text, max(0, run[0] - 60), run[0])]
    if not allowed:
        return ""
    start, end = allowed[-1]
    items = [text[start:end]]
    for other, behind in runs:
        if other >= end and JOINED.fullmatch(text, end, other):
            items, end = [*items, text[other:behind]], behind
        elif not stated and behind <= start and re.fullmatch(r"[\s*]*,?\s*(?:or\s+|或)[\s*]*", text[behind:start]):
            items.insert(0, text[other:behind])
    unit = UNIT.match(text, end, end + 100)
    last = unit.end() if unit else end
    changed = CHANGES.match(text, last)
    items[-1] += text[end : changed.end() if changed else last]
    different = {without_form(item): item for item in reversed(items)}
    return ", ".join(map(unwrapped, reversed(different.values())))


def _runs(text: str) -> list[tuple[int, int]]:
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


def words(text: str, shortest: int = 3) -> list[str]:
    """Words of at least `shortest` letters, and Chinese characters, except function names and LaTeX commands. Unless `shortest` is 2,
    "and", "for" and alphabet runs are excluded too: xyz may be a product."""
    found = re.findall(rf"[A-Za-z]{{{shortest},}}|[{HAN}]", NO_WORDS.sub(" ", text))
    return [word for word in found if shortest == 2 or (word not in string.ascii_lowercase and word.lower() not in ("and", "for"))]


def is_formula(text: str) -> bool:
    plain = unwrapped(text.strip())
    if not plain or len(plain) > LONGEST_FORMULA or "\n" in plain or "#" in plain:
        return False
    is_plain = not (NO_FORMULA.search(plain) or words(plain, 2))
    return is_plain or quantity(plain) is not None or NUMERAL.fullmatch(plain.lower()) is not None


def without_form(text: str) -> str:
    """Normalize an answer, so that 1/2 equals 0.5, and 12 cm equals 120 mm."""
    found = quantity(sides(text)[-1])
    if found is None:
        return "".join(text.split())
    kinds, size = found.unit
    return f"{found.value * size} {sorted(kinds)}" if kinds else str(found.value)
