from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from roll_lite.config.schema.base import Mistakes, rule
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed, RewardFunction, RewardType, checked_score


@dataclass(frozen=True)
class Term:
    label: str
    weight: float
    function: RewardFunction


class Reward:
    """Sum of a base reward and weighted terms. Only the base decides correctness; a failed term fails the sample."""

    def __init__(self, base: RewardFunction, terms: Sequence[Term] = ()) -> None:
        self.name = base.name
        self.base = base
        self.terms = tuple(terms)
        self.functions = (base, *(term.function for term in self.terms))
        self.is_async = any(function.is_async for function in self.functions)
        self.is_batched = any(function.is_batched for function in self.functions)

    def combined(self, results: Sequence[Score | RewardFailed | None]) -> Score:
        for place, result in enumerate(results):
            if isinstance(result, RewardFailed):
                raise result if place == 0 else RewardFailed(f"term {self.terms[place - 1].label}: {result.cause}")
        base, *others = [result for result in results if isinstance(result, Score)]
        if not self.terms:
            return base
        value, details, terms = base.value, {"base": base.value, **base.details}, {"base": base.value}
        for term, score in zip(self.terms, others, strict=True):
            terms[term.label] = term.weight * score.value
            value += terms[term.label]
            details[term.label] = score.value
            details.update({f"{term.label}.{key}": detail for key, detail in score.details.items()})
        value = checked_score(value, f"{self.name} with its terms")
        return replace(base, value=value, correct=base.is_correct, details=details, terms=terms)

    def warm(self) -> None:
        for function in self.functions:
            function.type.warm()

    def describe(self) -> str:
        return "; ".join(filter(None, (function.type.describe() for function in self.functions)))


def labels_of(names: Sequence[str]) -> list[str]:
    labels: list[str] = []
    for name in names:
        short = name.rpartition(".")[2]
        count = sum(label == short or label.startswith(f"{short}_") for label in labels)
        labels.append(short if count == 0 else f"{short}_{count + 1}")
    return labels


Count = Annotated[int, Field(ge=0)]


class LengthReward(RewardType):
    """Rewards the length of the response; used as a term of another reward.

    With `target`, the value is 1 at that length and falls linearly to 0 at a distance of `width` on either side. With `limit`, it is 1 up
    to that length and falls to 0 at `limit` + `width`. With neither, it is length / `width`, at most 1. Lengths are in characters or,
    with `unit: words`, in words separated by white space.

    ```yaml
    reward:
      name: math
      terms:
        - {name: length, args: {limit: 2000, width: 1000}, weight: 0.2}      # 0.2 up to 2,000 characters, nothing from 3,000 on
    ```
    """

    answers_are_responses = False

    target: Count | None = None
    """Ideal length."""
    limit: Count | None = None
    """Longest ideal length, instead of a target."""
    width: Annotated[int, Field(ge=1)] = 100
    """Distance from the ideal length at which the value is 0."""
    unit: Literal["characters", "words"] = "characters"
    """Unit of the length."""

    @rule
    def _one_aim(self) -> Mistakes:
        if self.limit is not None and self.target is not None:
            yield "limit", "length takes target or limit, not both; remove one"

    def __call__(self, sample: RewardInput) -> Score:
        count = len(sample.response if self.unit == "characters" else sample.response.split())
        if self.target is None and self.limit is None:
            return Score(min(1.0, count / self.width), None, {self.unit: float(count)})
        off = max(0, count - self.limit) if self.limit is not None else abs(count - (self.target or 0))
        return Score(max(0.0, 1 - off / self.width), off == 0, {self.unit: float(count)})


class RepetitionReward(RewardType):
    """Share of n-grams that occurred earlier in the response, from 0 to almost 1, ignoring case. As a term, it needs a negative weight.
    A response with fewer than `n` words (or characters) scores 0.

    ```yaml
    reward:
      name: math
      terms:
        - {name: repetition, args: {n: 4, free: 0.1}, weight: -0.5}
    ```
    """

    answers_are_responses = False

    n: Annotated[int, Field(ge=1)] = 4
    """Length of the n-grams."""
    unit: Literal["words", "characters"] = "words"
    """Unit of the n-grams."""
    free: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Repeated share up to which the value is 0; from there it rises linearly to 1."""

    def __call__(self, sample: RewardInput) -> Score:
        text = sample.response.casefold()
        parts = text.split() if self.unit == "words" else text
        count = len(parts) - self.n + 1
        if count <= 0:
            return Score(0.0, None, {"repeated": 0.0})
        different = len({tuple(parts[start : start + self.n]) for start in range(count)})
        share = 1 - different / count
        return Score(max(0.0, share - self.free) / (1 - self.free), None, {"repeated": share})
