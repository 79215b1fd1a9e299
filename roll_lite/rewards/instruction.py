"""Reward `instruction`: the response follows instructions that a program can check (IFEval's 25)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.problems import Problem
from roll_lite.config.schema import RunConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import after_thinking
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.instruction_checks import CHECKS
from roll_lite.rewards.reward_type import RewardType, too_slow
from roll_lite.rewards.time_limit import TimeLimitExceeded, limited

Mode = Literal["strict", "loose"]


class InstructionReward(RewardType):
    """The response follows instructions that a program can check (IFEval's 25): 1 where every instruction is followed by what stands behind
    the last `</think>`, else 0.

    The row's columns `ids` and `arguments` hold the instructions as IFEval's data does: a list of ids, and a list with the arguments of
    each. An instruction that is not known, or whose arguments do not fit, is a failure; one whose check takes longer than `cpu_limit_s` is
    not followed, and named as `too_long` in the details.

    ```yaml
    reward:
      type: instruction       # rows as those of IFEval: instruction_id_list, kwargs
      args: {mode: loose, score: fraction}
    ```
    """

    reads_answer_first = True

    mode: Mode = "strict"
    """loose also accepts a response that follows an instruction once its first or last line or its asterisks are taken away."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 where every instruction is followed. fraction: the share that is."""
    ids: str = "instruction_id_list"
    """Column with the list of instructions."""
    arguments: str = "kwargs"
    """Column with the arguments of each."""
    cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """Computing time of one check, less than `timeout_s`; an instruction whose check takes longer counts as not followed."""

    def __call__(self, sample: RewardInput) -> Score:
        asked = _list(sample, self.ids)
        given = _list(sample, self.arguments) if self.arguments in sample.columns else [None] * len(asked)
        if not asked or len(asked) != len(given):
            counted = f"{len(asked)} ids in column {self.ids!r}, {len(given)} arguments in column {self.arguments!r}"
            raise RewardFailed(f"reward instruction: {counted}")
        response = after_thinking(sample.response, sample.prompt)
        texts = [response] if self.mode == "strict" else _variants(response)
        too_long: list[str] = []

        def is_followed(name: Any, own: Any) -> bool:
            try:
                return limited(self.cpu_limit_s, lambda: _is_followed(name, _arguments(name, own), texts))
            except (TimeLimitExceeded, RecursionError, MemoryError):
                too_long.append(str(name))
                return False

        missed = [name for name, own in zip(asked, given, strict=True) if not is_followed(name, own)]
        followed = len(asked) - len(missed)
        value = followed / len(asked) if self.score == "fraction" else float(not missed)
        details: dict[str, float | str] = {"followed": float(followed), "instructions": float(len(asked)), "missed": ", ".join(missed)}
        return Score(value, not missed, details | ({"too_long": ", ".join(too_long)} if too_long else {}))

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        yield from too_slow(place, "cpu_limit_s", self.cpu_limit_s, self.cpu_limit_s, timeout_s)

    def no_response(self) -> str:
        return "constraints"


def _is_followed(name: Any, arguments: dict[str, Any], texts: list[str]) -> bool:
    check = CHECKS.get(name)
    if check is None:
        raise RewardFailed(f"reward instruction: there is no instruction {name!r:.80}; there are {', '.join(CHECKS)}")
    try:
        # Checked before the texts are, so that bad arguments show whatever the response is.
        verdicts = [check(text, **arguments) and bool(text.strip()) for text in texts]
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardFailed(f"reward instruction: {name}: arguments {arguments!r:.200}: {error}") from error
    return any(verdicts)


def _arguments(name: Any, given: Any) -> dict[str, Any]:
    """The data set as a table has all names in every row, None where they are not meant; its numbers may have become floats."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RewardFailed(f"reward instruction: {name}: arguments {given!r:.80} are no JSON: {error}") from error
    if given is not None and not isinstance(given, Mapping):
        raise RewardFailed(f"reward instruction: {name}: arguments must be a dict, got {given!r:.80}")
    values = {str(key): value for key, value in (given or {}).items() if value is not None}
    return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in values.items()}


def _list(sample: RewardInput, column: str) -> list[Any]:
    value = sample.columns.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RewardFailed(f"reward instruction: column {column!r} is no JSON: {error}") from error
    if value is None or isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise RewardFailed(f"reward instruction: column {column!r} must hold a list, got {value!r:.80}")
    return list(value)


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    cut = [response, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return [*cut, *(text.replace("*", "") for text in cut)]
