r"""Where in a response an answer stands: after the thinking, in <answer></answer>, in \boxed{}."""

from __future__ import annotations

import re

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
END_OF_THINKING = re.compile(r".*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
BOX = "\\boxed{"
BOX_NAME = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))(-?[\w.,]*\w)")
MOST_BOXES = 20


def after_thinking(response: str) -> str:
    """What the response says once it has thought; all of it where it never ends its thinking."""
    return END_OF_THINKING.sub("", response, count=1)


def last_tagged(response: str) -> str | None:
    tags = TAGGED.findall(response)
    return tags[-1] if tags else None


def plain_boxes(text: str) -> str:
    r"""With \boxed{} wherever there is an \fbox{} or a \boxed 5."""
    return BOX_NAME.sub(r"\\boxed{", BARE_BOX.sub(r"\\boxed{\1}", text)) if "box" in text else text


def last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{} whose braces are closed."""
    start = text.rfind(BOX)
    while start >= 0:
        depth = 0
        for position in range(start + len(BOX) - 1, len(text)):
            character = text[position]
            if character in "{}" and text[position - 1] != "\\":
                depth += 1 if character == "{" else -1
                if depth == 0:
                    return text[start + len(BOX) : position]
        start = text.rfind(BOX, 0, start)
    return None


def all_boxed(text: str) -> list[str]:
    r"""Contents of all \boxed{}, the last first."""
    found: list[str] = []
    while BOX in text and len(found) < MOST_BOXES:
        last = last_boxed(text)
        if last is None:
            break
        found.append(last)
        text = text[: text.rfind(BOX + last)]
    return found
