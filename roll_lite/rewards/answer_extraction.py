r"""Where in a response an answer stands: after the thinking, in <answer></answer>, in \boxed{}."""

from __future__ import annotations

import re

TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
BOX = "\\boxed{"
BRACE = re.compile(r"\\boxed\{|(?<!\\)[{}]")
BOX_NAME = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))(-?[\w.,]*\w)")
BLANK = re.compile(r"(?:\\[hv]?phantom\{[^{}]*\}|\\hspace\*?\{[^{}]*\}|\\q?quad|\\[ ,;:!]|\\_|[\s~?_.…])*")
"""A box to fill in, quoted from the question."""
BETWEEN_BOXES = re.compile(r"[\s,;$]*(?:\b(?:or|and)\b|\\text\{\s*(?:or|and)\s*\}|[,;或和])?[\s,;$]*")
"""What makes one answer of two boxes."""
MOST_BOXES = 20
WIDE = str.maketrans({chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | dict(zip("。、【】《》", ".,[]<>", strict=True)))
HAN = "\u3040-\u30ff\u4e00-\u9fff"
BESIDE_HAN = re.compile(rf"(?<=[{HAN}])(?=[\w\\$+(-])(?![{HAN}])|(?<=[\w}}$%)])(?<![{HAN}])(?=[{HAN}])")


def narrow(text: str) -> str:
    """East Asian text with the digits, letters and marks of ASCII, and a blank between words and numbers that stand side by side."""
    return text if text.isascii() else BESIDE_HAN.sub(" ", text.translate(WIDE))


def after_thinking(response: str, prompt: str = "") -> str:
    """What the response says once it has thought: behind the last </think>, and nothing where a thought is not closed. `prompt`: a chat
    template may have opened the thought already."""
    tags = list(THINKING.finditer(response))
    is_open = tags[-1][1] == "" if tags else prompt.rstrip().lower().endswith(("<think>", "<thinking>"))
    return "" if is_open else response[tags[-1].end() :] if tags else response


def last_tagged(response: str) -> str | None:
    found, start = None, None
    for tag in TAG.finditer(response):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            found, start = response[start : tag.start()], None
    return found


def plain_boxes(text: str) -> str:
    r"""With \boxed{} wherever there is an \fbox{} or a \boxed 5."""
    return BOX_NAME.sub(r"\\boxed{", BARE_BOX.sub(r"\\boxed{\1}", text)) if "box" in text else text


def last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{} whose braces are closed, and that has some."""
    return next((text[start:end] for start, end in _boxes(text) if not BLANK.fullmatch(text, start, end)), None)


def all_boxed(text: str) -> list[str]:
    r"""Contents of all \boxed{}, the last first."""
    found: list[str] = []
    before = len(text)
    for start, end in _boxes(text):
        if end < before and len(found) < MOST_BOXES:
            if not BLANK.fullmatch(text, start, end):
                found.append(text[start:end])
            before = start - len(BOX)
    return found


def last_boxes(text: str) -> list[str]:
    r"""Contents of the last \boxed{} and of those in front of it with nothing but `and`, `or` or a comma between them, in order."""
    found: list[str] = []
    before = len(text)
    for start, end in _boxes(text):
        if end < before and not BLANK.fullmatch(text, start, end):
            if len(found) == MOST_BOXES or (found and not BETWEEN_BOXES.fullmatch(text, end + 1, before)):
                break
            found.insert(0, text[start:end])
            before = start - len(BOX)
    return found


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of each closed \boxed{} begin and end, the last first."""
    opened: list[tuple[bool, int]] = []
    closed: list[tuple[int, int]] = []
    for brace in BRACE.finditer(text) if BOX in text else ():
        if brace[0] != "}":
            opened.append((brace[0] == BOX, brace.end()))
        elif opened:
            is_box, start = opened.pop()
            if is_box:
                closed.append((start, brace.start()))
    return sorted(closed, reverse=True)
