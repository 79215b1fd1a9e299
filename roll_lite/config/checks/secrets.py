from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_lite.config.problems import LEFT_OUT, Problem, secret_in_address
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig


def addresses_without_secrets(config: RunConfig) -> Iterator[Problem]:
    for path, text in texts_in(config, ""):
        what = secret_in_address(text)
        if what is not None:
            message = f"holds {what}, which would be written into logs; remove it, and name a key's variable in api_key_env"
            yield Problem(path, message)


def plain_secrets(config: RunConfig) -> list[str]:
    return [
        f"{path} is left out ({LEFT_OUT}) of config.yaml and checkpoints; write ${{oc.env:NAME}} in its place, which they can hold"
        for path, text in texts_in(config.model_dump(mode="json"), "")
        if text == LEFT_OUT
    ]


def texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (YAML path, text); skip invalid fields."""
    if isinstance(value, str):
        yield path, value
    items = vars(value) if isinstance(value, Section) else value
    if isinstance(items, dict | list):
        for key, item in items.items() if isinstance(items, dict) else enumerate(items):
            yield from texts_in(item, f"{path}.{key}".lstrip("."))
