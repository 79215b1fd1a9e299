"""A domain's reward: do the functions of its types exist, do they take the arguments given, is its format a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator

from roll_lite.config.problems import Problem
from roll_lite.config.reward_reference import check_reward
from roll_lite.config.schema import DomainConfig, RewardConfig, RewardTermConfig, RunConfig

CLOCK = 3
"""Seconds by the clock for each second of computing that a program may have."""
CODE_TOTAL_S = 8.0
MATH_CPU_LIMIT_S = 5.0
"""The defaults of the rewards `code` and `math`; a test holds both against them."""


def _reward(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    yield from check_reward(f"{path}.reward", domain.reward.type, domain.reward.args)


def _terms(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    for index, term in enumerate(domain.reward.terms):
        yield from check_reward(f"{path}.reward.terms.{index}", term.type, term.args)
        if term.weight == 0:
            yield Problem(f"{path}.reward.terms.{index}.weight", "the term is worth nothing; remove it, or give it a weight", term.weight)


def _programs_end_before_their_sample(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    """By the clock a sample's programs may take three times their computing time; a time-out before that would blame the worker."""
    total = domain.reward.args.get("total_s", CODE_TOTAL_S)
    if domain.reward.type == "code" and isinstance(total, int | float) and domain.reward.timeout_s <= CLOCK * total:
        message = f"programs of a sample may take {CLOCK} x total_s ({total:g}) = {CLOCK * total:g} s by the clock; use more than that"
        yield Problem(f"{path}.reward.timeout_s", message, domain.reward.timeout_s)


def _comparisons_end_before_their_sample(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    """A response that takes too long to compare is wrong; a time-out before that would make it a failure, tried again and excluded."""
    parts: list[tuple[str, RewardConfig | RewardTermConfig]] = [(f"{path}.reward", domain.reward)]
    parts += [(f"{path}.reward.terms.{i}", term) for i, term in enumerate(domain.reward.terms)]
    for place, part in parts:
        limit = part.args.get("cpu_limit_s", MATH_CPU_LIMIT_S)
        if part.type == "math" and isinstance(limit, int | float) and limit >= domain.reward.timeout_s:
            whole = f"{path}.reward.timeout_s: {domain.reward.timeout_s:g}"
            message = f"must be less than the time of the whole sample ({whole}); use less, or raise that"
            yield Problem(f"{place}.args.cpu_limit_s", message, limit)


def compile_format(pattern: str) -> re.Pattern[str]:
    """The one way to compile a format's pattern, here and where it is scored: `.` matches line breaks. ValueError with what is wrong."""
    if not pattern:
        raise ValueError("the empty pattern matches every response")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression that can be compiled: {error}") from error


def check_format(pattern: str) -> str | None:
    """What is wrong with the pattern, if anything."""
    try:
        compile_format(pattern)
    except ValueError as error:
        return str(error)
    return None


def _format_pattern(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    wrong = check_format(domain.reward.format.pattern) if domain.reward.format else None
    if wrong is not None:
        assert domain.reward.format is not None
        yield Problem(f"{path}.reward.format.pattern", wrong, domain.reward.format.pattern)


REWARD_CHECKS = (_reward, _terms, _programs_end_before_their_sample, _comparisons_end_before_their_sample, _format_pattern)
