"""Check a response's format by a pattern: reward `format` and a domain's section `format`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from roll_lite.config.schema.base import Mistakes, rule
from roll_lite.config.schema.domains import Pattern, RewardConfig
from roll_lite.config.text_templates import compile_format
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardType
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited

FORMAT_SECONDS = 1.0
"""CPU time limit of one search; a pattern that backtracks for longer does not match."""
TOO_LONG = "the pattern ran out of time"

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
    """Score 1 if the response matches a pattern, your own or a built-in one, else 0. Mostly used as one of another reward's `terms`.

    ```yaml
    reward:
      name: math
      terms:
        - {name: format, args: {preset: think_answer}, weight: 0.2}
    ```
    """

    answers_are_responses = False

    pattern: Pattern | None = None
    """Regular expression to find in the response. `.` matches line breaks; anchor with ^ and $."""
    preset: Literal["think_answer", "think", "answer", "boxed"] | None = None
    r"""Built-in pattern. think_answer: `<think>...</think><answer>...</answer>`, each once, and nothing else. think: one
    `<think>...</think>`, at the start. answer: one `<answer>...</answer>`. boxed: a `\boxed{}`."""

    @rule
    def _one_form(self) -> Mistakes:
        if (self.pattern is None) == (self.preset is None):
            yield "", "give either pattern or preset"

    def __call__(self, sample: RewardInput) -> Score:
        pattern = PRESETS[self.preset] if self.preset is not None else self.pattern or ""
        found = _found(pattern, sample.response, FORMAT_SECONDS)
        return Score(float(bool(found)), bool(found), {"verdict": TOO_LONG} if found is None else {})


FormatCheck = Callable[[str], bool]


def format_check(config: RewardConfig) -> FormatCheck | None:
    if config.format is None:
        return None
    pattern, seconds = config.format.pattern, min(FORMAT_SECONDS, config.timeout_s / 2)
    return lambda response: bool(_found(pattern, response, seconds))


def _found(pattern: str, response: str, seconds: float) -> bool | None:
    try:
        return limited(seconds, lambda: compile_format(pattern).search(response)) is not None
    except TimeLimitExceeded:
        return None
