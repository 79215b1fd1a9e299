r"""Find the answer in a response: in <answer></answer> or \boxed{}, without thoughts and text cut off at the token limit."""

from __future__ import annotations

import re

from roll_lite.data.boxes import BLANK, BOX, BOX_NAME, boxes
from roll_lite.data.samples import FinishReason, RewardInput

TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*+)</answer>", re.IGNORECASE | re.DOTALL)
THINKING = re.compile(r"<(?:(/)|(?<!['\"`]<))think(?:ing)?>", re.IGNORECASE)  # '<think>' in a program opens nothing
QUAD = r"\\q?quad(?![A-Za-z])"
_SPACE = rf"(?:[\s,;$]|\\[()\[\],;:! ]|{QUAD})*+"
BETWEEN_BOXES = re.compile(rf"{_SPACE}(?:\b(?:or|and)\b|\\text\s*\{{\s*,?\s*(?:or|and)\s*\}}|[或和])?{_SPACE}")
MOST_BOXES = 20
WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    "。、【】《》", ".,[]<>", "\u00ad\u200b\u200e\u200f\u2060\ufeff"
)
CUT = "cut at its limit of tokens"
HAN = "\u3040-\u30ff\u4e00-\u9fff"
SCRIPTS = "\u0400-\u1cff\u3040-\ud7ff"  # Cyrillic to Hangul: unlike Latin and Greek letters, theirs are no variables
BESIDE_HAN = re.compile(rf"(?<=[{HAN}])(?=[\w\\$+(-])(?![{HAN}])|(?<=[\w}}$%)])(?<![{HAN}])(?=[{HAN}])")

SENTENCE = re.compile(r"[.!?…][*_\"'”’)\]]*(?=\s)|[。！？]|\n")
DISPLAY = re.compile(r"\$\$.*?(?:(\$\$)|\Z)|\\\[.*?(?:(\\\])|\Z)", re.DOTALL)


def narrow(text: str) -> str:
    return text if text.isascii() else BESIDE_HAN.sub(" ", text.translate(WIDE))


def after_thinking(sample: RewardInput) -> str:
    return without_thinking(sample.response, sample.prompt)


def without_thinking(text: str, prompt: str = "") -> str:
    """Text after the last </think>; empty if a <think>, perhaps at the end of `prompt`, is not closed."""
    tags = list(THINKING.finditer(text))
    is_open = tags[-1][1] is None if tags else prompt.rstrip().lower().endswith(("<think>", "<thinking>"))
    return "" if is_open else text[tags[-1].end() :] if tags else text


def is_cut(sample: RewardInput) -> bool:
    return sample.finish_reason == FinishReason.LENGTH


def complete(sample: RewardInput) -> str:
    return "" if is_cut(sample) else after_thinking(sample)


def finished(sample: RewardInput) -> str:
    """Drop thinking and, if the response was cut at the token limit, its last incomplete sentence, line or formula."""
    if not is_cut(sample):
        return after_thinking(sample)
    text = BOX_NAME.sub(r"\\boxed{", after_thinking(sample))
    ends = [0, *(one.end() for one in SENTENCE.finditer(text)), *(one.end() for one in TAG.finditer(text) if one[1])]
    ends += [end + 1 for _, end in boxes(text)]
    return DISPLAY.sub(lambda one: one[0] if one.lastindex else "", text[: max(ends)])


def last_tagged(response: str) -> str | None:
    return next(reversed(TAGGED.findall(response)), None)


def last_boxes(text: str) -> list[str]:
    r"""Contents of the last nonempty \boxed{} and of earlier ones joined to it only by commas, `and` or `or`."""
    found: list[str] = []
    before = len(text)
    for start, end in boxes(text):
        if end < before and not BLANK.fullmatch(text, start, end):
            if len(found) == MOST_BOXES or (found and not BETWEEN_BOXES.fullmatch(text, end + 1, before)):
                break
            found.insert(0, text[start:end])
            before = start - len(BOX)
    return found
