"""A reference answer, written as a response would be."""

from __future__ import annotations

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
        return "a value, not the program asked for" if args.get("must_contain") or args.get("forbid") else None
    return NO_RESPONSE.get(reward)


def reference_response(args: Mapping[str, Any], answer: Any) -> str | None:
    """A response that should be right; None where the answer is no text."""
    first = answer[0] if isinstance(answer, list) and answer else answer  # a list: any of its entries counts
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(str(args.get("extract")), "{}").format(first)
