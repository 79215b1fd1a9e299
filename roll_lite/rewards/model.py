"""Reward `model`: a sequence-classification reward model scores the response. What is said of it here is its domain's side; the
models themselves run in clusters of their own (workers/reward_model.py)."""

from __future__ import annotations

import math
from string import Formatter
from typing import Literal

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.placeholders import chat_as_text, filling, is_chat

Scale = Literal["none", "sigmoid"]
ScoredText = str | list[dict[str, str]]
"""What a reward model reads: a text, or chat messages for its own chat template."""

CHAT = "chat"


def model(
    sample: RewardInput,
    *,
    model: str,
    template: str = "{prompt}{response}",
    question: str = "{question}",
    scale: Scale = "none",
    threshold: float = 0.0,
) -> Score:
    """The output of the reward model that `reward_models.<model>` describes.

    template: the text that it reads. {prompt} is the policy's input with its template applied, {question} the prompt as the data has it,
    {response} the policy's response without special tokens and thinking, {answer} the reference answer, any other name a column of the
    data.
    chat: the reward model's own chat template instead, with `question`, a text with the same placeholders, as the user's message and the
    response as the assistant's. Where `question` is one placeholder for a list of chat messages, the response follows them.
    scale: the output as it is, or its sigmoid, between 0 and 1. A response counts as correct where the output, unscaled, is above
    threshold. A text longer than the model's max_length is a failure.
    """
    raise RewardFailed(f"reward model: {model!r} scores within a run only, in the processes that hold the model")


def scored_text(sample: RewardInput, *, template: str = "{prompt}{response}", question: str = "{question}") -> ScoredText:
    """What the reward model reads of a sample; RewardFailed where a column is missing."""
    if template != CHAT:
        return _filled(template, sample)
    response = {"role": "assistant", "content": str(filling("response", sample))}
    asked = filling(question[1:-1], sample) if question.startswith("{") else None
    if is_chat(asked):
        return [*asked, response]
    return [{"role": "user", "content": _filled(question, sample)}, response]


def score_of(output: float, *, scale: Scale = "none", threshold: float = 0.0) -> Score:
    if not math.isfinite(output):
        raise RewardFailed(f"reward model: its output is {output}, which is not finite")
    value = output if scale == "none" else 1 / (1 + math.exp(-output)) if output >= 0 else math.exp(output) / (1 + math.exp(output))
    return Score(value, output > threshold, {"reward_model": output})


def nothing(sample: RewardInput) -> float:
    """What further terms and the format check of such a domain are added to before the model's output comes."""
    return 0.0


def _filled(template: str, sample: RewardInput) -> str:
    parts = []
    for text, name, _, _ in Formatter().parse(template):
        parts.append(text)
        if name is not None:
            value = filling(name, sample)
            if is_chat(value):
                value = chat_as_text(value)
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                what = "is missing" if value is None else f"must be a string or a number, got {value!r:.80}"
                raise RewardFailed(f"reward model: column {name!r}, a placeholder of the template, {what}")
            parts.append(str(value))
    return "".join(parts)
