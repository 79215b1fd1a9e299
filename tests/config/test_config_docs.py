"""docs/configuration.md is what the schema says, and the schema says something about every field."""

from __future__ import annotations

from roll_lite.config.docs import PAGE, render
from roll_lite.config.validation import sections


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m roll_lite.config.docs"


def test_every_field_is_described_and_listed() -> None:
    text = render()
    for path, cls in sections():
        assert f"## {cls.__name__}" in text
        for name, info in cls.model_fields.items():
            assert info.description or name == "name", f"{'.'.join(path)}.{name} has no description"
            assert f"| `{name}` |" in text
    assert "| `devices` | integer > 0 or list of (integer >= 0 or text) | `1` |" in text
    assert "| `domains` | mapping of name to [DomainConfig](#domainconfig) | required |" in text
