"""What a judge is shown of a sample."""

from __future__ import annotations

import json
from functools import lru_cache
from string import Formatter

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.placeholders import chat_as_text, filling, is_chat


@lru_cache(maxsize=64)
def template_parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """(text, placeholder after it or None); ValueError where it is no template."""
    try:
        parts = [(text, name, spec, conversion) for text, name, spec, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces that stay") from None
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise ValueError(f"{{{name}}} is no placeholder; write {{{{ and }}}} for braces that stay")
    if not any(name == "response" for _, name, _, _ in parts):
        raise ValueError("never shows the response; put {response} where it belongs")
    return tuple((text, name) for text, name, _, _ in parts)


def checked_template(template: str) -> str:
    template_parts(template)
    return template


def filled(template: str, sample: RewardInput) -> str:
    """In one go: braces in a prompt or a response are never looked at."""
    return "".join(text + ("" if name is None else _filling(name, sample)) for text, name in template_parts(template))


def _filling(name: str, sample: RewardInput) -> str:
    value = filling(name, sample)
    if value is None:
        raise RewardFailed(f"reward judge: the template has {{{name}}}, which this sample has not")
    if is_chat(value):
        return chat_as_text(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
