"""Reward `format`: a term for the response's form, by a pattern of one's own or a known one."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, Self

from pydantic import field_validator, model_validator

from roll_lite.config.checks.rewards import compile_format
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.reward_type import RewardType
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.text.format_check import FORMAT_SECONDS

INSIDE = "(?:(?!</?{tag}>).)*"
THINK = "<think>" + INSIDE.format(tag="think") + "</think>"
ANSWER = "<answer>" + INSIDE.format(tag="answer") + "</answer>"
PRESETS: dict[str, str] = {
    "think_answer": rf"\A\s*{THINK}\s*{ANSWER}\s*\Z",
    "think": rf"\A\s*{THINK}(?!.*</?think>)",
    "answer": rf"\A(?:(?!</?answer>).)*{ANSWER}(?!.*</?answer>)",
    "boxed": r"\\boxed\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}",
}


class FormatReward(RewardType):
    r"""A term for the response's form, by a pattern of one's own or a known one: 1 where the response has it, else 0.

    ```yaml
    reward:
      type: math
      terms:
        - {type: format, args: {preset: think_answer}, weight: 0.2}
    ```
    """

    pattern: str | None = None
    """Regular expression that has to match somewhere in the response (`.` matches line breaks; anchor with ^ and $)."""
    preset: Literal["think_answer", "think", "answer", "boxed"] | None = None
    r"""A form by name, in place of the pattern. think_answer: `<think>...</think><answer>...</answer>`, each once, and nothing else; think
    and answer: one such pair, think at the start; boxed: a `\boxed{}`."""

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compile_format(pattern)
        return pattern

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.pattern is None) == (self.preset is None):
            raise ValueError("give either pattern or preset")
        return self

    def __call__(self, sample: RewardInput) -> Score:
        compiled = _compiled(PRESETS[self.preset] if self.preset is not None else self.pattern or "")
        try:
            found = limited(FORMAT_SECONDS, lambda: compiled.search(sample.response)) is not None
        except TimeLimitExceeded as error:
            raise RewardFailed(f"reward format: time-out: pattern {compiled.pattern!r:.80}: {error}") from error
        return Score(float(found), found)

    def no_response(self) -> str:
        return "nothing"


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return compile_format(pattern)
