"""The pattern of a domain's format bonus: one way to compile it, for the check before the start and for the reward workers."""

from __future__ import annotations

import re


def compile_format(pattern: str) -> re.Pattern[str]:
    """`.` matches line breaks. ValueError with what is wrong."""
    if not pattern:
        raise ValueError("the empty pattern matches every response")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression that can be compiled: {error}") from error


def check_format(pattern: str) -> str | None:
    """What is wrong with the pattern, if anything."""
    try:
        compile_format(pattern)
    except ValueError as error:
        return str(error)
    return None
