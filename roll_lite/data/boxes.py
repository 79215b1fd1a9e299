from __future__ import annotations

import re

BOX = "\\boxed{"
BRACE = re.compile(r"\\boxed\{|\\[\\{}]|[{}]")
ESCAPES = ("\\\\", "\\{", "\\}")
BOX_NAME = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))(-?[\w.,]*\w)")
BLANK = re.compile(r"(?:\\[hv]?phantom\{[^{}]*\}|\\hspace\*?\{[^{}]*\}|\\q?quad|\\[ ,;:!]|\\_|[\s~?_.…])*")
r"""Content of a box that counts as empty: spaces, dots, or LaTeX space such as \quad. Responses may quote such boxes from the question."""


def plain_boxes(text: str) -> str:
    r"""Rewrite \fbox{...}, and boxes without braces, as \boxed{...}."""
    return BOX_NAME.sub(r"\\boxed{", BARE_BOX.sub(r"\\boxed{\1}", text)) if "box" in text else text


def last_boxed(text: str) -> str | None:
    return next((text[start:end] for start, end in boxes(text) if not BLANK.fullmatch(text, start, end)), None)


def boxes(text: str) -> list[tuple[int, int]]:
    r"""(start, end) of each closed box's content, last box first."""
    opened: list[tuple[bool, int]] = []
    closed: list[tuple[int, int]] = []
    for brace in BRACE.finditer(text) if BOX in text else ():
        if brace[0] in ESCAPES:
            continue
        if brace[0] != "}":
            opened.append((brace[0] == BOX, brace.end()))
        elif opened:
            is_box, start = opened.pop()
            if is_box:
                closed.append((start, brace.start()))
    return sorted(closed, reverse=True)
