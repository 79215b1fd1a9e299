from __future__ import annotations

import hashlib
import json
from string import Formatter
from typing import Any, TypeGuard

from roll_lite.config.text_templates import placeholders
from roll_lite.data.samples import RewardInput
from roll_lite.rewards.answer_extraction import after_thinking
from roll_lite.rewards.base import RewardFailed

QUESTION = "question"


def checked_template(template: str) -> str:
    if "response" not in placeholders(template):
        raise ValueError("never shows the response; put {response} where it belongs")
    return template


OF_THE_SAMPLE = ("prompt", "response", "answer", "fence", QUESTION)


def columns_in(template: str) -> tuple[str, ...]:
    return tuple(name for name in placeholders(template) if name not in OF_THE_SAMPLE)


def filled(template: str, sample: RewardInput, reward: str, response: str | None = None) -> str:
    """Fill all placeholders in one pass: braces in a filled-in text are no placeholders."""
    parts = []
    for text, name, _, _ in Formatter().parse(template):
        value = "" if name is None else response if name == "response" and response is not None else filling(name, sample)
        if value is None:
            raise RewardFailed(f"reward {reward}: the template has {{{name}}}, which this sample has not")
        if is_chat(value):
            turns = [f"{message['role']}: {message['content']}" for message in value]
            value = "\n\n".join(turns) if len(turns) > 1 else str(value[0]["content"])
        parts += [text, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)]
    return "".join(parts)


def filling(name: str, sample: RewardInput) -> Any:
    """Value of a placeholder; None if the sample has none."""
    own = {"prompt": sample.prompt, "response": after_thinking(sample), "answer": sample.answer}
    if name in own:
        return own[name]
    if name == "fence":  # derived from the response, so that a greedy judge gets the same question in every run
        return f"=== {hashlib.sha256(sample.response.encode(errors='surrogatepass')).hexdigest()[:16]} ==="
    if name == QUESTION and name not in sample.columns:
        return sample.prompt if sample.question is None else sample.question
    return sample.columns.get(name)


def is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value)
