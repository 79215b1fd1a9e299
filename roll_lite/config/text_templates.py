from __future__ import annotations

import re
from functools import cache
from string import Formatter

BRACES = "write {{ and }} for braces that stay"


def placeholders(text: str) -> list[str]:
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"is no template: {error}; {BRACES}") from error
    for name, spec, conversion in fields:
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{{{name}}} is no placeholder; {BRACES}")
    return list(dict.fromkeys(name for name, _, _ in fields))


@cache
def compile_format(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise ValueError("the empty pattern matches every response")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression that can be compiled: {error}") from error
