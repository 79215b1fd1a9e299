"""Reference answers written as responses."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

NEUTRAL = {"+": "+0", "-": "-0", "*": "*1"}
"""Suffixes that add a required operator to an expression without changing a number's value."""
WRAPPED = {"boxed": r"\boxed{{{}}}", "tagged": "<answer>{}</answer>"}


def written(answer: Any, extract: str = "") -> str | None:
    """Text of the answer at the place where `extract` finds it; None if it cannot be written as a response."""
    first = answer[0] if isinstance(answer, list) and answer else answer  # of a list any entry counts
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(extract, "{}").format(first)


def no_expression(must_contain: Sequence[str], forbid: Sequence[str]) -> str | None:
    """Description of the answers if no expression with these pieces can be made from them; else None."""
    if not forbid and all(piece in NEUTRAL for piece in must_contain):
        return None
    marks = [*(f"with {piece!r}" for piece in must_contain), *(f"without {piece!r}" for piece in forbid)]
    return f"values, and a response is an expression {' and '.join(marks)} that is worth one"


def expression_worth(answer: Any, pieces: Sequence[str] = ()) -> str | None:
    """Python expression for a value; a text that is a literal is used as it is. For a number, `pieces` (operators) are added."""
    written = repr(answer) if answer is not None else None
    value = answer
    try:
        if isinstance(answer, str):
            value = ast.literal_eval(answer.strip())
            written = answer
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if not pieces or written is None:
        return written
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return written.strip() + "".join(NEUTRAL[piece] for piece in pieces) if is_number else None
