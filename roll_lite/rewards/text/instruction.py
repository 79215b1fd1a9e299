from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import CUT, complete, is_cut
from roll_lite.rewards.base import RewardFailed, RewardType
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.text.instruction_checks import CHECKS, read_arguments
from roll_lite.rewards.text.instruction_checks.parts import visible

Mode = Literal["strict", "loose"]
Asked = tuple[str, dict[str, Any]]
GROUND_TRUTH = "ground_truth"
FUNCTION = "func_name"
IDS = ("instruction_id", "instruction_id_list")


class InstructionReward(RewardType):
    """Score 1 if the response, after the last `</think>`, follows all of its row's instructions, else 0.

    A sample with an unknown instruction or bad arguments fails. An instruction whose check takes longer than `cpu_limit_s` counts as not
    followed; `too_long` in the details lists it.

    | data set | instructions | ids such as | layout of a row |
    |---|---|---|---|
    | IFEval | 25 | `keywords:existence`, `startend:end_checker` | columns `instruction_id_list` and `kwargs` |
    | RLVR-IFEval of AllenAI | 25 | `verify_keywords`, `validate_end` | `{"func_name": "validate_end", "end_phrase": "Bye."}` |
    | IF-RLVR (IFTrain) | 29 and IFEval's | `copy:repeat_phrase`, `count:count_unique` | `[{"instruction_id": [...], "kwargs": [...]}]` |
    | IFBench | 58 | `ratio:stop_words`, `custom:csv_city` | columns `instruction_id_list` and `kwargs` |

    If a row lacks the column `instruction_id_list`, its instructions are in the reference answer (`data: {answer: ground_truth}`) or the
    column `ground_truth`: one of the layouts above or a list of them, as values, JSON or Python literals. Null arguments are ignored.

    Checks need no downloads and pass the originals' test cases, with a few [exceptions](#checks-that-differ).

    ```yaml
    reward:
      name: instruction       # rows as in IFEval: instruction_id_list, kwargs; or data: {answer: ground_truth}
      args: {mode: loose, score: fraction}
    ```
    """

    reads_answer_first = True
    answers_are_responses = False

    mode: Mode = "strict"
    """strict: check the response as it is. loose: also try it without its first line, last line or asterisks."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every instruction is followed. fraction: the share of followed instructions."""
    cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """CPU time limit of one check; less than `timeout_s`."""

    def __call__(self, sample: RewardInput) -> Score:
        asked = asked_of(sample)
        response = visible(complete(sample))
        texts = [response]
        if self.mode == "loose":
            lines = response.split("\n")
            texts += ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
            texts += [text.replace("*", "") for text in texts]
        too_long: list[str] = []

        def is_followed(name: str, own: dict[str, Any]) -> bool:
            try:
                return limited(self.cpu_limit_s, lambda: _is_followed(name, own, texts))
            except (TimeLimitExceeded, RecursionError, MemoryError):
                too_long.append(name)
                return False

        missed = [name for name, own in asked if not is_followed(name, own)]
        followed = len(asked) - len(missed)
        value = followed / len(asked) if self.score == "fraction" else float(not missed)
        details: dict[str, float | str] = {"followed": float(followed), "instructions": float(len(asked)), "missed": ", ".join(missed)}
        details |= {"too_long": ", ".join(too_long)} if too_long else {}
        return Score(value, not missed, details | ({"verdict": CUT} if is_cut(sample) else {}))

    def longest_s(self) -> dict[str, float]:
        return {"cpu_limit_s": self.cpu_limit_s}


def _is_followed(name: str, arguments: dict[str, Any], texts: list[str]) -> bool:
    check = CHECKS.get(name)
    if check is None:
        nearest = difflib.get_close_matches(name[:80], CHECKS, n=3, cutoff=0)
        raise RewardFailed(f"reward instruction: there is no instruction {name!r:.80}; the nearest are {', '.join(nearest)}")
    try:
        # Run the check even on an empty text: bad arguments must always show.
        given = read_arguments(arguments)
        verdicts = [check(text, **given) and bool(text.strip()) for text in texts]
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardFailed(f"reward instruction: {name}: arguments {arguments!r:.200}: {error}") from error
    return any(verdicts)


def asked_of(sample: RewardInput) -> list[Asked]:
    if sample.columns.get(IDS[1]) is not None:
        return _paired(sample.columns, IDS[1], "column ")
    together = sample.answer if sample.answer is not None else sample.columns.get(GROUND_TRUTH)
    if together is None:
        raise RewardFailed(
            f"reward instruction: column {IDS[1]!r} must hold a list, got None; nor is there a reference answer with instructions"
        )
    asked = _together(together)
    if not asked:
        raise RewardFailed("reward instruction: the reference answer holds no instruction")
    return asked


def _together(value: Any) -> list[Asked]:
    value = _parsed(value, "the reference answer")
    if isinstance(value, Mapping):
        if FUNCTION in value:
            return [_asked(value[FUNCTION], {key: own for key, own in value.items() if key != FUNCTION})]
        for key in IDS:
            if key in value:
                return _paired(value, key, "")
    elif hasattr(value, "__iter__"):
        return [one for each in value for one in _together(each)]
    raise RewardFailed(f"reward instruction: the reference answer has neither {FUNCTION!r} nor {IDS[0]!r}: {value!r:.200}")


def _paired(row: Mapping[str, Any], key: str, where: str) -> list[Asked]:
    names = _list(row[key], f"{where}{key!r}")
    given = _list(row["kwargs"], f"{where}'kwargs'") if row.get("kwargs") is not None else [None] * len(names)
    if not names or len(names) != len(given):
        raise RewardFailed(f"reward instruction: {len(names)} ids in {where}{key!r}, {len(given)} arguments in {where}'kwargs'")
    return list(map(_asked, names, given))


def _asked(name: Any, given: Any) -> Asked:
    """Return an instruction's id and arguments. Null arguments are dropped and whole floats become integers: tabular data sets store unused
    arguments as null and integers as floats."""
    given = _parsed(given, f"{name}: arguments")
    if given is not None and not isinstance(given, Mapping):
        raise RewardFailed(f"reward instruction: {name}: arguments must be a dict, got {given!r:.80}")
    arguments: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if value is not None:
            is_whole = isinstance(value, float) and value.is_integer()
            arguments[str(key)] = int(value) if is_whole else visible(value) if isinstance(value, str) else value
    return str(name), arguments


def _list(value: Any, where: str) -> list[Any]:
    value = _parsed(value, where)
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise RewardFailed(f"reward instruction: {where} must hold a list, got {value!r:.80}")
    return list(value)


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise RewardFailed(f"reward instruction: {what} {value!r:.80} is no JSON: {error}") from error
