r"""Where in a response its answer stands: a formula alone, tags, boxes, a statement, or whatever mathematics comes last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from roll_lite.rewards.answer_extraction import all_boxed, last_boxed, last_boxes, last_tagged, plain_boxes
from roll_lite.rewards.math.numbers import DIGITS, quantity, unwrapped
from roll_lite.rewards.math.parsing import Parsed, inside_boxed, is_formula, is_percentage, searched

Extract = Literal["auto", "boxed", "tagged", "number"]
Boxes = Literal["last", "all"]

LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])[+-])?{DIGITS}(?:/\d+)?(?:\s*\\?%)?")
STATED = re.compile(
    r"(?:^\s*#{4}|\banswer\b[\s*`]*+(?:\bis\b)?[\s*`]*+[:=]?|答案\s*(?:是|为|等于)?\s*[:=]?)[\s*`]*+([^\n]+)", re.IGNORECASE | re.MULTILINE
)
"""GSM8K's #### 72, The answer is 72, and the same in Chinese."""
AGAIN = re.compile(
    r"\A(?:.*[.!?;]\s+(?:(?:so|no|wait|thus|hence|therefore|actually|but)\b,?\s+)*(?:the\s+|my\s+)?(?:final\s+|correct\s+|right\s+)?"
    r"answer\b[\s*`]*(?:\bis\b[\s*`]*[:=]?|[:=])|.*#{4})[\s*`]*(?=(?:[$({\[*+-]|\\[(\[])*\s*(?:\.?\d|\\[a-z]))",
    re.IGNORECASE,
)
"""The answer is 5. The answer is 6: behind it stands what counts."""
SURELY = r"(?:(?:is|was|definitely|certainly|clearly|surely|probably|absolutely|really|simply|likely)\s+)*"
DENIED = re.compile(
    rf"{SURELY}(?:not|never|neither|cannot|(?:ca|is|was|could|would|should|does|wo)n['’]t|不是|不等于)\b"
    r"(?:.*?(?:\b(?:but|rather|it\s+is|it['’]s)\b|而是)\s*(.*))?",
    re.IGNORECASE,
)
DENIED_BEFORE = re.compile(
    rf"(?:(?:\b(?:not|never|cannot)\b|n['’]t\b)\s+(?:(?:be|equal|equals|equal\s+to|the|an?)\s+)*{SURELY}"
    r"|\b(?:other|rather)\s+than\s+|\banything\s+but\s+|\bneither\s+)(?:[$*`(\s]|\\[(\[])*\Z",
    re.IGNORECASE,
)
PERHAPS = r"(?:maybe|perhaps|possibly|alternatively|even|else)\b[\s,]*"
ALTERNATIVES = re.compile(rf"\s*[.;,]?\s*\b(?:or|and|alternatively)\b\s*(?:{PERHAPS})?|\s*[.;,]\s*{PERHAPS}|\s*[或和]\s*", re.IGNORECASE)
EITHER = re.compile(r"^(?:either|both)\s+", re.IGNORECASE)
"""3 or 5 are two answers."""
ONE_OR_OTHER = re.compile(rf"([+-]?{DIGITS}(?:/\d+)?(?:\s*\\?%)?)\s+or\s+\Z")
LABEL = re.compile(r"\A\s*A:\s+(?=\S)")
"""As behind Q: in examples."""
REMARK = re.compile(r"\s*(?:\((?!\s*\\?p?mod\b)|[.!](?=\s)|\b(?:an?|in|for|on|at|by|with|from|because|since|when|after|each|every|per)\b)")
"""Behind a quantity: what follows says more about it."""
RATE = re.compile(r"\s*\b(?:in|for|per|each|every)\s+(?:every\s+)?\d+\Z")
"""5 in 6 is no 5."""
HEDGED = re.compile(r"[.;,(]\s*(?:or|alternatively|maybe|perhaps)\b[\s,]*[$\\(+-]*\d", re.IGNORECASE)
GOES_ON = re.compile(r"(?:[√π^!]|(?<=\b0)[xob](?=[\da-f])|\s?:\s?(?=\d))[^\s,;]*", re.IGNORECASE)
"""Signs that math-verify's search in running text does not know."""
SEVERAL = re.compile(r";|,(?!\d{3}(?!\d))|\b(?:or|and)\b")
"""In front of an equals sign: what is behind it is one of several answers."""
CHANGES = re.compile(
    r"\s+(?:over|plus|minus|times|divided|out\s+of|tenths?|hundredths?|thousandths?|thirds?|fifths?|sixths?|eighths?|squared|cubed|factorial"
    r"|to\s+the\s+\w*\s*power|and\s+(?:an?|one|two|three)\s+(?:half|thirds?|quarters?|fifths?)"
    r"|(?:less|more|fewer|greater|smaller|higher|lower)\s+than\s+(?=[$\\(\d+-]|[b-hj-z]\b))\b[^\n.]*"
    r"|\s+(?:hundred|thousand|million|billion|trillion|dozen)\b",
    re.IGNORECASE,
)
"""Words behind a number that make another one of it: 5 less than 12, and not 5 less."""
LONGEST_NUMBER = 60


@dataclass(frozen=True)
class Answer:
    text: str
    """As it stands in the response; empty where there is none."""
    parsed: Parsed | None = None
    """What math-verify's search made of it; None where the text is one formula that was not parsed yet."""
    exclaims: bool = False
    """It ends a sentence: a ! behind it need not be a factorial."""


def find_answer(response: str, extract: Extract, boxes: Boxes = "last") -> Answer:
    response = plain_boxes(response)
    if extract == "tagged":
        return _said(inside_boxed(last_tagged(response) or ""))
    if extract == "boxed":
        return _boxed(response, boxes, beside=False) or Answer("")
    if extract == "number":
        numbers = LAST_NUMBER.findall(response)
        return Answer(numbers[-1] if numbers else "")
    response = LABEL.sub("", response)
    if is_formula(response):
        return Answer(response.strip())
    tagged = last_tagged(response)
    if tagged is not None:
        return _said(inside_boxed(tagged))
    boxed = _boxed(response, boxes)
    if boxed is not None:
        return boxed
    stated = _statements(response)
    if stated and not stated[-1]:
        return Answer("")
    found = _alternatives(stated[-1]) or _leading(stated[-1]) if stated else _alternatives(response)
    return found or _searched(response)


def find_words(response: str, extract: Extract, boxes: Boxes = "last") -> Answer:
    """Where the reference is words, which no search for formulas would find."""
    if extract == "number":
        return find_answer(response, extract)
    response = plain_boxes(response)
    place = last_boxed(response) if extract == "boxed" else last_tagged(response)
    if extract == "auto" and place is None:
        found = list(dict.fromkeys(all_boxed(response)))[: 1 if boxes == "last" else None]
        place = ", ".join(sorted(found)) if found else response
    text = inside_boxed(place or "")
    stated = STATED.findall(text)
    return Answer((stated[-1] if stated else text).strip())


def _boxed(response: str, boxes: Boxes, beside: bool = True) -> Answer | None:
    """The last box, with those `beside` it, or all of them as a list; None where there is none."""
    found = list(dict.fromkeys(box.strip() for box in reversed(all_boxed(response))))
    if not found:
        return None
    if boxes == "last":
        found = [box.strip() for box in last_boxes(response)] if beside else found[-1:]
    return _said(found[-1]) if len(found) == 1 else Answer(", ".join(found))


def _said(text: str) -> Answer:
    """What stands in a place for the answer: a formula, or a sentence around it."""
    text = LABEL.sub("", text).strip()
    if is_formula(text):
        return Answer(text)
    stated = _statements(text)
    if stated and not stated[-1]:
        return Answer("")
    if stated and is_formula(_bare(stated[-1])):
        return Answer(_bare(stated[-1]))
    return _leading(stated[-1] if stated else text) or Answer(text)


def _bare(text: str) -> str:
    """Without what emphasises it and ends its sentence; the point of .5 is its own."""
    return text.lstrip("*` \r\n\t").rstrip("*` .!\r\n\t")


def _statements(text: str) -> list[str]:
    """What is said to be the answer, one after the other."""
    return [_affirmed(AGAIN.sub("", stated, count=1)) for stated in STATED.findall(text)]


def _affirmed(stated: str) -> str:
    """8 of: not 7 but 8; nothing of: not 7."""
    denied = DENIED.match(stated)
    return stated if denied is None else denied[1] or ""


def _alternatives(text: str) -> Answer | None:
    """Of a text that is formulas only, with words between them; the same number twice is one."""
    text = _bare(text)
    parts = ALTERNATIVES.split(EITHER.sub("", text))
    if not all(map(is_formula, parts)):
        return None
    different = {_key(part): part for part in reversed(parts)}
    return Answer(", ".join(map(unwrapped, reversed(different.values()))) if len(different) > 1 else parts[0], exclaims=len(parts) == 1)


def _key(text: str) -> Any:
    """Answers with the same are the same: 0.5 and 50%."""
    found = quantity(text)
    return (found.number.value, found.unit) if found is not None else text


def _leading(text: str) -> Answer | None:
    """The quantity that the text begins with, 42 apples of: 42 apples in 3 days."""
    text = _bare(text)
    remark = REMARK.search(text)
    if remark is None or RATE.match(text, remark.start()):
        return None
    if SEVERAL.search(text, remark.start()) or HEDGED.search(text, remark.start()) or quantity(text[: remark.start()].strip("*` ")) is None:
        return None
    return Answer(text[: remark.start()].strip("*` "))


def _searched(response: str) -> Answer:
    """Where math-verify finds something in running text."""
    text, parsed = searched(response)
    if not parsed:
        return Answer("")
    place = response.rfind(text)
    if place > 0 and DENIED_BEFORE.search(response[max(0, place - LONGEST_NUMBER) : place]):
        return Answer("")
    behind = place + len(text)
    beyond = (GOES_ON.match(response, behind) or CHANGES.match(response, behind)) if text in response else None
    if beyond is not None:
        return Answer(text + beyond[0].rstrip("."))
    text = f"{text}%" if is_percentage(parsed) and not text.endswith("%") else text
    end = max(0, response.rfind(text))
    other = ONE_OR_OTHER.search(response, max(0, end - LONGEST_NUMBER), end)
    if other is not None and _key(other[1]) != _key(text):
        return Answer(f"{other[1]}, {text}")
    return Answer(text, parsed)
