"""Reward `format`: a term for the response's form, by a pattern of one's own or a known one."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from roll_lite.config.check_rewards import compile_format
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.format import FORMAT_SECONDS
from roll_lite.rewards.time_limit import TimeLimitExceeded, limited

Preset = Literal["think_answer", "think", "answer", "boxed"]

INSIDE = "(?:(?!</?{tag}>).)*"
THINK = "<think>" + INSIDE.format(tag="think") + "</think>"
ANSWER = "<answer>" + INSIDE.format(tag="answer") + "</answer>"
PRESETS: dict[str, str] = {
    "think_answer": rf"\A\s*{THINK}\s*{ANSWER}\s*\Z",
    "think": rf"\A\s*{THINK}(?!.*</?think>)",
    "answer": rf"\A(?:(?!</?answer>).)*{ANSWER}(?!.*</?answer>)",
    "boxed": r"\\boxed\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}",
}


def _is_pattern(pattern: str | None) -> str | None:
    if pattern is not None:
        compile_format(pattern)
    return pattern


Pattern = Annotated[str | None, AfterValidator(_is_pattern)]


def format(sample: RewardInput, *, pattern: Pattern = None, preset: Preset | None = None) -> Score:
    """1 where the response has the form, else 0.

    pattern: a regular expression that has to match somewhere (`.` matches line breaks; anchor with ^ and $). preset: think_answer is
    <think>...</think><answer>...</answer>, each once, and nothing else; think and answer are one such pair, think at the start; boxed a
    \\boxed{}.
    """
    try:
        check_format_args(pattern, preset)
    except ValueError as error:
        raise RewardFailed(f"reward format: {error}") from error
    compiled = _compiled(PRESETS[preset] if preset is not None else pattern or "")
    try:
        found = limited(FORMAT_SECONDS, lambda: compiled.search(sample.response)) is not None
    except TimeLimitExceeded as error:
        raise RewardFailed(f"reward format: time-out: pattern {compiled.pattern!r:.80}: {error}") from error
    return Score(float(found), found)


def check_format_args(pattern: str | None = None, preset: str | None = None, **_: Any) -> None:
    """ValueError where the arguments do not say what to look for, or say it twice."""
    if (pattern is None) == (preset is None):
        raise ValueError(f"{'pattern' if preset is None else 'preset'}: give either pattern or preset")


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return compile_format(pattern)
