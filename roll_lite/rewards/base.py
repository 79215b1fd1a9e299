"""Base class of reward types, and calls of reward functions.

A sample whose scoring fails does not train. So only the reference answer, a service or the machine may make scoring fail, and a bad
response scores low: otherwise the policy could learn to have wrong responses left out.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
import traceback
import typing
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.samples import RewardInput, Score

Scores = TypeVar("Scores")

SCORE_KEYS = ("value", "correct", "details", "answer")
HARMLESS_RESPONSE = "I do not know."
CANNED_RESPONSE = "The answer is 1."
"""Response for tests of rewards and environments before the engines start."""
BY_INPUT = (RecursionError, ValueError, ArithmeticError, LookupError)
"""Exceptions of built-in rewards that the response may have caused."""
LARGEST_SCORE = (2 - 2**-23) * 2.0**127


class RewardFailed(Exception):
    @property
    def cause(self) -> str:
        return str(self)


class ResponseSuspected(RewardFailed):
    """Failure that the response may have caused. If a harmless response can be scored, the suspected one gets the lowest score; otherwise
    the sample fails."""


class RewardType(Section):
    """Base class of reward types; fields are arguments in YAML. Docstrings become docs/rewards.md."""

    within_a_run: ClassVar[bool] = False
    reads_answer_first: ClassVar[bool] = False
    """True if the reward parses the reference answer first: scoring an empty response then checks the reference."""
    answers_are_responses: ClassVar[bool] = True
    """False if reference answers, such as instruction ids, cannot be scored as responses."""
    unshown: ClassVar[tuple[str, ...]] = ()
    """Arguments not shown in messages: they may hold a secret."""

    def __call__(self, sample: Any) -> Any:
        raise NotImplementedError

    def lowest(self) -> float:
        return 0.0

    def warm(self) -> None:
        """Do slow first-call work (imports, tables) before time limits apply."""

    def at_once(self) -> int | None:
        """Maximum samples per call (None: unlimited); a call must finish within one sample's time limit."""
        return None

    def concurrent_calls(self) -> int | None:
        """Maximum concurrent calls in one process (None: unlimited). The time limit of a call that waits does not run."""
        return None

    def describe(self) -> str:
        return ""

    def longest_s(self) -> dict[str, float]:
        """{argument: seconds of a sample's wall-clock limit}."""
        return {}

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        """Yield configuration problems. `place`: YAML path of the reward; `timeout_s`: a sample's time limit."""
        for argument, seconds in self.longest_s().items():
            if seconds >= timeout_s:
                whole = f"the whole sample has {timeout_s:g} (the reward's timeout_s): use less, or raise that"
                yield Problem(f"{place}.args.{argument}", f"allows {seconds:g} s by the clock; {whole}", getattr(self, argument))

    def needs_answer(self) -> bool:
        return False

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        """Data columns that the reward reads, by the argument that names them."""
        return {}

    def response_for(self, answer: Any) -> str | None:
        return written(answer) if self.answers_are_responses else None


WRAPPED = {"boxed": r"\boxed{{{}}}", "tagged": "<answer>{}</answer>"}


def written(answer: Any, extract: str = "") -> str | None:
    """Write the answer as `extract` requires; None if it is neither text nor number."""
    first = answer[0] if isinstance(answer, list) and answer else answer  # any entry of a list is correct
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return WRAPPED.get(extract, "{}").format(first)


class RewardFunction:
    def __init__(self, name: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.name = name
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
        self.is_batched = is_batched(function)
        self.type = function if isinstance(function, RewardType) else RewardType()
        self._function = function
        self._args = dict(args)

    def run(self, scoring: Coroutine[Any, Any, Scores]) -> Scores:
        """Run `score` or `scores` of a sync function. They never suspend, so no event loop is needed."""
        try:
            scoring.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a sync function that waits")

    async def score(self, item: RewardInput) -> Score:
        try:
            return _scored(await self._called([item]))
        except ResponseSuspected as failure:
            suspected = failure
        _scored(await self._called([replace(item, response=HARMLESS_RESPONSE)]))
        if self.is_async:
            try:  # the service may have recovered
                return _scored(await self._called([item]))
            except ResponseSuspected as failure:
                suspected = failure
        return Score(self.type.lowest(), False, {"verdict": suspected.cause}, answer=None)

    async def scores(self, items: list[RewardInput]) -> list[Score | RewardFailed]:
        """Score samples in one call. The caller scores those with ResponseSuspected one by one; a single sample never gets it."""
        try:
            return [await self.score(items[0])] if len(items) == 1 else await self._called(items)
        except RewardFailed as failure:
            return [RewardFailed(failure.cause)] if len(items) == 1 else [ResponseSuspected(failure.cause)] * len(items)

    async def _called(self, items: list[RewardInput]) -> list[Score | RewardFailed]:
        try:
            results = self._function(items if self.is_batched else items[0], **self._args)
            results = await results if self.is_async else results
        except RewardFailed:
            raise
        except Exception as error:  # process edge: any exception of user code is recorded as a failure
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = ResponseSuspected if isinstance(self._function, RewardType) and isinstance(error, BY_INPUT) else RewardFailed
            where = f"({last.filename}, line {last.lineno})"
            raise kind(f"reward {self.name}: {type(error).__name__}: {error} {where}") from error
        if not self.is_batched:
            results = [results]
        elif isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
            raise RewardFailed(f"reward {self.name}: returned {results!r:.80} for a list of samples; expected a list of as many scores")
        found = list(results)
        if len(found) != len(items):
            raise RewardFailed(f"reward {self.name}: returned {len(found)} scores for {len(items)} samples")
        scores: list[Score | RewardFailed] = []
        for one in found:
            try:
                scores.append(one if isinstance(one, RewardFailed) else to_score(one, self.name))
            except RewardFailed as failure:
                scores.append(failure)
        return scores


def _scored(scores: list[Score | RewardFailed]) -> Score:
    [score] = scores
    if isinstance(score, RewardFailed):
        raise score
    return score


def is_batched(function: Callable[..., Any]) -> bool:
    said = getattr(function, "batched", None)
    if said is not None:
        return bool(said)
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        return False
    hint = hints_of(function).get(parameters[0].name, parameters[0].annotation)
    if isinstance(hint, str):  # unresolved: a type that only the type checker imports
        return re.match(r"([\w.]*\.)?(list|List|Sequence)\b", hint) is not None
    return (typing.get_origin(hint) or hint) in (list, Sequence)


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__, include_extras=True)
    except (NameError, TypeError):
        return {}


def to_score(result: Any, name: str) -> Score:
    """Convert a number, bool, Score or dict of its fields to a Score; RewardFailed for other types, infinity and NaN."""
    result, reward = _plain(result), f"reward {name}"
    given: Any = {key: getattr(result, key) for key in SCORE_KEYS} if isinstance(result, Score) else result
    if not isinstance(given, Mapping):
        given = {"value": result, "correct": result if isinstance(result, bool) else None}
    unknown = sorted(str(key) for key in given if key not in SCORE_KEYS)
    if unknown or "value" not in given:
        problem = f"unknown {', '.join(unknown)}" if unknown else "no value"
        raise RewardFailed(f"{reward}: returned a dict with {problem}; its keys are {', '.join(SCORE_KEYS)}, all but value optional")
    value, correct, details, answer = given["value"], _plain(given.get("correct")), given.get("details", {}), given.get("answer")
    if not isinstance(_plain(value), numbers.Real):
        what = f"returned {value!r:.80} of type {type(value).__name__}"
        raise RewardFailed(f"{reward}: {what}; expected a number, a bool, a Score or a dict")
    if not isinstance(correct, bool | None):
        raise RewardFailed(f"{reward}: correct must be a bool or None, got {correct!r:.80}")
    if not isinstance(answer, str | None):
        raise RewardFailed(f"{reward}: answer must be a string or None, got {answer!r:.80}")
    if not isinstance(details, Mapping):
        raise RewardFailed(f"{reward}: details must be a dict, got {details!r:.80}")
    for key, detail in details.items():
        if not isinstance(_plain(detail), numbers.Real | str):
            raise RewardFailed(f"{reward}: details[{key!r}]: must be a number or a string, got {detail!r:.80}")
    kept = {str(key): detail if isinstance(detail, str) else _float(detail) for key, detail in details.items()}
    return Score(checked_score(_float(value), name), correct, kept, answer=answer)


def checked_score(number: float, name: str) -> float:
    if not abs(number) <= LARGEST_SCORE:
        what = f"is beyond float32, whose largest number is {LARGEST_SCORE:.5g}" if math.isfinite(number) else "is not finite"
        raise RewardFailed(f"reward {name}: returned {number:.5g}, which {what}")
    return number


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _plain(value: Any) -> Any:
    return bool(value) if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_") else value
