"""What a judge is shown of a sample."""

from __future__ import annotations

import json

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.answer_extraction import CUT, finished, is_cut
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.placeholders import chat_as_text, filling, is_chat, template_parts


def filled(template: str, sample: RewardInput) -> str:
    """In one go: braces in a prompt or a response are never looked at."""
    return "".join(text + ("" if name is None else _filling(name, sample)) for text, name in template_parts(template))


def _filling(name: str, sample: RewardInput) -> str:
    if name == "response":
        return f"{finished(sample)}\n[The response was {CUT}.]" if is_cut(sample) else finished(sample)
    value = filling(name, sample)
    if value is None:
        raise RewardFailed(f"reward judge: the template has {{{name}}}, which this sample has not")
    if is_chat(value):
        return chat_as_text(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
