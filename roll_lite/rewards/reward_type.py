"""Base class of built-in reward types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig


class RewardType(Section):
    """Base class of reward types. Its fields are the arguments in YAML.

    Docstrings of types, each with a YAML example, and of fields become docs/rewards.md.
    """

    within_a_run: ClassVar[bool] = False
    """True if only the processes of a run can compute the reward."""
    reads_answer_first: ClassVar[bool] = False
    """True if the reward reads the reference answer before the response, and scores an empty response quickly."""
    unshown: ClassVar[tuple[str, ...]] = ()
    """Arguments that may hold a secret: messages never show their values."""

    def __call__(self, sample: Any) -> Any:
        """Score a sample, or a list of samples; sync or async, as a user's function may be."""
        raise NotImplementedError

    def lowest(self) -> float:
        """Score of a response that caused a failure of the reward."""
        return 0.0

    def warm(self) -> None:
        """Do a first call's slow work (imports, tables) before time limits run; ValueError if something is missing."""

    def at_once(self) -> int | None:
        """Maximum samples per call, for rewards that score lists; None: unlimited. The time limit of one sample holds for the whole
        call."""
        return None

    def describe(self) -> str:
        """Note for the user on how the reward runs here; may be empty."""
        return ""

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        """Find the reward's problems in this configuration. `place`: YAML path of the reward; `timeout_s`: time limit of a sample."""
        yield from ()

    def needs_answer(self) -> bool:
        return False

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        """Argument -> the data columns that it names. Defaults are left out."""
        return {}

    def no_response(self) -> str | None:
        """What the reference answers hold instead of responses, such as "tests"; None if they can be scored like responses."""
        return None

    def response_for(self, answer: Any) -> str | None:
        """Response that should be correct for this answer; None if there is none."""
        return written(answer)


def too_slow(place: str, argument: str, value: float, seconds: float, timeout_s: float) -> Iterator[Problem]:
    """Yield a problem if a time limit inside the reward (`seconds`) is not below the sample's `timeout_s`, which would end the sample
    first."""
    if seconds >= timeout_s:
        message = f"allows {seconds:g} s by the clock; the whole sample has {timeout_s:g} (the reward's timeout_s): use less, or raise that"
        yield Problem(f"{place}.args.{argument}", message, value)


WRAPPED = {"boxed": r"\boxed{{{}}}", "tagged": "<answer>{}</answer>"}


def written(answer: Any, extract: str = "") -> str | None:
    """Write a response with the answer in the form that `extract` requires (boxed, tagged). None if the answer is neither text nor
    number."""
    first = answer[0] if isinstance(answer, list) and answer else answer  # of a list any entry counts
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(extract, "{}").format(first)
