"""Reward of a domain: the function of its type, plus weighted terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed, RewardFunction, checked_score


@dataclass(frozen=True)
class Term:
    label: str
    """Name in details and causes; unique within its reward."""
    weight: float
    function: RewardFunction


class Reward:
    """Sum of base and weight * term. The base alone decides whether a sample is correct; if a term fails, the sample fails."""

    def __init__(self, base: RewardFunction, terms: Sequence[Term] = ()) -> None:
        self.name = base.name
        self.base = base
        self.terms = tuple(terms)
        self.functions = (base, *(term.function for term in self.terms))
        """Functions of the base and the terms, in this order."""
        self.is_async = any(function.is_async for function in self.functions)
        self.is_batched = any(function.is_batched for function in self.functions)

    def __call__(self, item: RewardInput) -> Score:
        """Score without an event loop."""
        results: list[Score | RewardFailed] = []
        for function in self.functions:
            try:
                results.append(function(item))
            except RewardFailed as failure:
                results.append(failure)
                break
        return self.combined(results)

    def combined(self, results: Sequence[Score | RewardFailed]) -> Score:
        """Sum of the functions' results; raises the first failure."""
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
        """Do the work of a first call before a time limit runs."""
        for function in self.functions:
            function.warm()

    def describe(self) -> str:
        """Information for the user about how it runs on this machine."""
        return "; ".join(filter(None, (function.describe() for function in self.functions)))

    def close(self) -> None:
        for function in self.functions:
            function.close()


def labels_of(names: Sequence[str]) -> list[str]:
    """Short labels: the last part of each dotted path, numbered if repeated."""
    labels: list[str] = []
    for name in names:
        short = name.rpartition(".")[2]
        count = sum(label == short or label.startswith(f"{short}_") for label in labels)
        labels.append(short if count == 0 else f"{short}_{count + 1}")
    return labels
