"""Base class of built-in reward types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig


class Unshown:
    """Marks an argument that may hold a secret: messages never show its value."""


class ArgumentSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RewardType(ArgumentSection):
    """A reward type, whose fields are its arguments. Validators report contradictory ones.

    docs/rewards.md is generated from the docstrings of the class, which ends with a YAML example, and of its fields.
    """

    within_a_run: ClassVar[bool] = False
    """True if only processes of a run can score it."""
    reads_answer_first: ClassVar[bool] = False
    """True if it reads the reference answer before the response, and scores an empty response quickly."""

    def __call__(self, sample: Any) -> Any:
        """Score a sample, or a list of samples, sync or async, like a user's function."""
        raise NotImplementedError

    def lowest(self) -> float:
        """Score of a response that the reward cannot read."""
        return 0.0

    def warm(self) -> None:
        """Do the work of a first call (imports, tables) before a time limit runs; ValueError if something is missing."""

    def at_once(self) -> int | None:
        """Maximum number of samples of a list scored side by side, each of which may take the whole time limit; None: any number."""
        return None

    def describe(self) -> str:
        """Describe, for the user, how it runs on this machine."""
        return ""

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        """Problems within this configuration. `place`: path of its section; `timeout_s`: time limit of a sample."""
        yield from ()

    def needs_answer(self) -> bool:
        return False

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        """Data columns that its arguments name, by argument; defaults excluded."""
        return {}

    def no_response(self) -> str | None:
        """What the reference answers are, in words, if they are no responses; else None."""
        return None

    def response_for(self, answer: Any) -> str | None:
        """Response that should be correct; None if the answer cannot be written as one."""
        return written(answer)


def too_slow(place: str, argument: str, value: float, seconds: float, timeout_s: float) -> Iterator[Problem]:
    """Problem if a limit inside the scoring of a sample is not below its time-out, which is a failure: retried and left out."""
    if seconds >= timeout_s:
        message = f"allows {seconds:g} s by the clock; the whole sample has {timeout_s:g} (the reward's timeout_s): use less, or raise that"
        yield Problem(f"{place}.args.{argument}", message, value)


WRAPPED = {"boxed": r"\boxed{{{}}}", "tagged": "<answer>{}</answer>"}


def written(answer: Any, extract: str = "") -> str | None:
    """Text of the answer where `extract` finds it; None if it cannot be written as a response."""
    first = answer[0] if isinstance(answer, list) and answer else answer  # of a list any entry counts
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(extract, "{}").format(first)
