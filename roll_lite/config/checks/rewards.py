"""Checks of a domain's reward: its format is a pattern, its terms have weights. Types and arguments are checked elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

from roll_lite.config.problems import Problem
from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.run import RunConfig


def _terms_weigh(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    for index, term in enumerate(domain.reward.terms):
        if term.weight == 0:
            yield Problem(f"{path}.reward.terms.{index}.weight", "the term is worth nothing; remove it, or give it a weight", term.weight)


def compile_format(pattern: str) -> re.Pattern[str]:
    """Compile a format's pattern, for checks and scoring: `.` matches line breaks. Raises ValueError with the reason."""
    if not pattern:
        raise ValueError("the empty pattern matches every response")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression that can be compiled: {error}") from error


def _format_pattern(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    if domain.reward.format is not None:
        try:
            compile_format(domain.reward.format.pattern)
        except ValueError as error:
            yield Problem(f"{path}.reward.format.pattern", str(error), domain.reward.format.pattern)


REWARD_CHECKS = (_terms_weigh, _format_pattern)
