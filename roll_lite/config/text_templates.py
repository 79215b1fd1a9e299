"""Texts with {placeholders} from the YAML, filled from data."""

from __future__ import annotations

from string import Formatter

BRACES = "write {{ and }} for braces that stay"


def placeholders(text: str) -> list[str]:
    """Distinct names of the placeholders; ValueError if the text is not a template."""
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"is no template: {error}; {BRACES}") from error
    for name, spec, conversion in fields:
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{{{name}}} is no placeholder; {BRACES}")
    return list(dict.fromkeys(name for name, _, _ in fields))
