"""A reference answer, written as a response would be."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

NO_RESPONSE = {
    "code": "tests",
    "instruction": "constraints",
    "length": "nothing",
    "repetition": "nothing",
    "format": "nothing",
}
"""Types whose reference answer is no response, and what it is."""

NEUTRAL = {"+": "+0", "-": "-0", "*": "*1"}
"""What shows an operator that an expression has to contain and leaves a number what it is."""
WRAPPED = {"boxed": r"\boxed{{{}}}", "tagged": "<answer>{}</answer>"}
"""By a type's `extract` argument."""


def no_response(reward: str, args: Mapping[str, Any]) -> str | None:
    """What the reference answers are, where they are no responses."""
    if reward == "code" and args.get("mode") == "expression":
        if not args.get("forbid") and all(piece in NEUTRAL for piece in args.get("must_contain", ())):
            return None
        marks = [
            *(f"with {piece!r}" for piece in args.get("must_contain", ())),
            *(f"without {piece!r}" for piece in args.get("forbid", ())),
        ]
        return f"values, and a response is an expression {' and '.join(marks)} that is worth one"
    return NO_RESPONSE.get(reward)


def reference_response(args: Mapping[str, Any], answer: Any) -> str | None:
    """A response that should be right; None where the answer is nothing that could be written as one."""
    if args.get("mode") == "expression":
        return expression_worth(answer, args.get("must_contain", ()))
    first = answer[0] if isinstance(answer, list) and answer else answer  # a list: any of its entries counts
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(str(args.get("extract")), "{}").format(first)


def expression_worth(answer: Any, pieces: Sequence[str] = ()) -> str | None:
    """Python for a value; a text that reads as a value is one already. With operators among `pieces`, a number's expression has them."""
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
