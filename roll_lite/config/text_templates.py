"""Texts with {placeholders}, which YAML names and data fills in."""

from __future__ import annotations

from string import Formatter

BRACES = "write {{ and }} for braces that stay"


def placeholders(text: str) -> list[str]:
    """Their names, each once; ValueError for what is no template."""
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"is no template: {error}; {BRACES}") from error
    for name, spec, conversion in fields:
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{{{name}}} is no placeholder; {BRACES}")
    return list(dict.fromkeys(name for name, _, _ in fields))
