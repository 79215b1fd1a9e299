"""A reference answer, written as a response would be."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

NO_RESPONSE = {
    "code": "tests",
    "instruction": "constraints",
    "length": "nothing",
    "repetition": "nothing",
    "format": "nothing",
}
"""Types whose reference answer is no response, and what it is."""

WRAPPED = {"boxed": r"\boxed{{{}}}", "tagged": "<answer>{}</answer>"}
"""By a type's `extract` argument."""


def no_response(reward: str, args: Mapping[str, Any]) -> str | None:
    """What the reference answers are, where they are no responses."""
    if reward == "code" and args.get("mode") == "expression":
        marks = [
            *(f"with {piece!r}" for piece in args.get("must_contain", ())),
            *(f"without {piece!r}" for piece in args.get("forbid", ())),
        ]
        return f"values, and a response is an expression {' and '.join(marks)} that is worth one" if marks else None
    return NO_RESPONSE.get(reward)


def reference_response(args: Mapping[str, Any], answer: Any) -> str | None:
    """A response that should be right; None where the answer is nothing that could be written as one."""
    if args.get("mode") == "expression":
        return expression_worth(answer)
    first = answer[0] if isinstance(answer, list) and answer else answer  # a list: any of its entries counts
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(str(args.get("extract")), "{}").format(first)


def expression_worth(answer: Any) -> str | None:
    """Python for a value; a text that reads as a value is one already."""
    try:
        if isinstance(answer, str):
            ast.literal_eval(answer.strip())
            return answer
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return repr(answer)
    return None if answer is None else repr(answer)
