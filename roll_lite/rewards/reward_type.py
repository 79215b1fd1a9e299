"""Base class of the built-in types of reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.rewards.references import written


class Unshown:
    """Marks an argument that may hold a secret: its value is repeated in no message."""


class ArgumentSection(BaseModel):
    """An argument with fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RewardType(ArgumentSection):
    """A type whose fields are its arguments. docs/rewards.md is made from the docstrings of the class, which ends with an example in YAML,
    and of the fields. Validators report arguments that contradict each other."""

    within_a_run: ClassVar[bool] = False
    """Scored by processes that only a run starts."""
    reads_answer_first: ClassVar[bool] = False
    """Reads the reference answer before the response, and scores an empty response at once."""

    def __call__(self, sample: Any) -> Any:
        """The score of a sample, or of a list of samples their scores, sync or async: as a function of a user's own."""
        raise NotImplementedError

    def lowest(self) -> float:
        """Score of a response that the reward cannot read."""
        return 0.0

    def warm(self) -> None:
        """Prepare what the first call would do (imports, tables), before a time limit runs; ValueError if something is missing."""

    def at_once(self) -> int | None:
        """Most samples of a list that are scored side by side, each of which may take the sample's time; None for any number."""
        return None

    def describe(self) -> str:
        """Information for the user about how it runs on this machine."""
        return ""

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        """Problems with it in this configuration. `place` is its section's path, `timeout_s` the time of a whole sample."""
        yield from ()

    def needs_answer(self) -> bool:
        """Can it score nothing without a reference answer?"""
        return False

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        """Columns of the data that its arguments name, by argument: what was given, no default."""
        return {}

    def no_response(self) -> str | None:
        """Description of the reference answers if they are no responses."""
        return None

    def response_for(self, answer: Any) -> str | None:
        """A response that should be right; None where the answer is nothing that could be written as one."""
        return written(answer)


def too_slow(place: str, argument: str, value: float, seconds: float, timeout_s: float) -> Iterator[Problem]:
    """A limit within a sample has to come before the sample's own: what hits that one is a failure, tried again and left out."""
    if seconds >= timeout_s:
        message = f"allows {seconds:g} s by the clock; the whole sample has {timeout_s:g} (the reward's timeout_s): use less, or raise that"
        yield Problem(f"{place}.args.{argument}", message, value)
