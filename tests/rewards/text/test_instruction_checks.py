"""The instructions of RLVR-IFEval, IF-RLVR and IFBench, and IFEval's by the cases of its own tests."""

from __future__ import annotations

import inspect
import time
from typing import Any

import numpy as np
import pytest
from rewards.text.ifbench_custom import CUSTOM
from support_cases import cases, records

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.text.instruction import InstructionReward
from roll_lite.rewards.text.instruction_checks import CHECKS, IF_TRAIN, IFBENCH, IFEVAL, RLVR_IFEVAL, read_arguments
from roll_lite.rewards.text.instruction_checks.parts import sentences, syllables, visible, words

FAMILIES = [
    (RLVR_IFEVAL, records("rewards/rlvr_ifeval"), 25),
    (IF_TRAIN, records("rewards/if_train"), 29),
    (IFBENCH, [*records("rewards/ifbench"), *CUSTOM], 58),
]
CASES: list[dict[str, Any]] = [*records("rewards/ifeval_reference"), *(case for _, rows, _ in FAMILIES for case in rows)]
FITTING: dict[str, dict[str, Any]] = {case["name"]: case["arguments"] for case in CASES}
"""Arguments that fit, for each instruction that a row asks for."""


def follows(name: str, response: str, arguments: dict[str, Any]) -> bool:
    return CHECKS[name](response, **read_arguments(arguments))


def item(response: str, answer: Any = None, **columns: Any) -> RewardInput:
    return RewardInput("if", "prompt", response, answer, columns, "stop")


@pytest.mark.parametrize(("name", "arguments", "response", "followed"), [tuple(case.values()) for case in CASES])
def test_cases(name: str, arguments: dict[str, Any], response: str, followed: bool) -> None:
    assert follows(name, response, arguments) is followed


@pytest.mark.parametrize(("checks", "rows", "count"), FAMILIES, ids=["rlvr", "if_train", "ifbench"])
def test_every_instruction_has_a_case_that_follows_and_one_that_does_not(checks: Any, rows: list[dict[str, Any]], count: int) -> None:
    assert len(checks) == count
    for name in checks:
        assert {case["followed"] for case in rows if case["name"] == name} == {True, False}, name


def test_the_families_share_no_id() -> None:
    assert len(CHECKS) == len(IFEVAL) + 25 + 29 + 58


@pytest.mark.parametrize("response", ["", " \n\t", "\u200b\u2060", "\u3164 \u2800", "<think>cut off"])
def test_what_shows_nothing_follows_nothing(response: str) -> None:
    row = item(response, [{"instruction_id": list(FITTING), "kwargs": list(FITTING.values())}])
    assert InstructionReward(score="fraction")(row).value == 0


@pytest.mark.parametrize(
    ("name", "arguments", "response"),
    [
        ("keywords:exclude_word_harder", {"keyword": "cat"}, "A c\u200bat."),
        ("validate_forbidden_words", {"forbidden_words": ["cat"]}, "A ca\u200dt."),
        ("punctuation:punctuation_dot", {}, "A c\u00ada\u2060t."),
        ("keywords:word_once", {"keyword": "cat"}, "A cat, a c\ufeffat."),
        ("count:count_unique", {}, "cat c\u200cat"),
        ("words:repeats", {"small_n": 1}, "cat \u3164cat\u2800"),
        ("format:no_whitespace", {}, "a\u2800b"),
    ],
)
def test_what_nobody_sees_changes_nothing(name: str, arguments: dict[str, Any], response: str) -> None:
    assert InstructionReward()(item(response, {"instruction_id": [name], "kwargs": [arguments]})).value == 0


def test_joiners_stay_where_they_mean_something() -> None:
    assert visible("می\u200cخواهم 👩\u200d🚀") == "می\u200cخواهم 👩\u200d🚀"


BAD = [None, "", " ", [], [""], [3], 1.5, True, -1, object()]


@pytest.mark.parametrize("name", [name for name in FITTING if FITTING[name]])
def test_bad_arguments_are_told_whatever_the_response_is(name: str) -> None:
    for argument in FITTING[name]:
        for response in ("", "x", "One word. Two words! " * 5):
            with pytest.raises(TypeError):
                follows(name, response, {key: value for key, value in FITTING[name].items() if key != argument})
            refused = 0
            for value in BAD:
                try:
                    follows(name, response, FITTING[name] | {argument: value})
                except (TypeError, ValueError):
                    refused += 1
            assert refused >= len(BAD) - 1, f"{argument} of {name}: {refused}"


def test_no_instruction_has_a_default() -> None:
    for name, check in CHECKS.items():
        _, *arguments = inspect.signature(check).parameters.values()
        assert all(one.kind is not one.VAR_KEYWORD and one.default is one.empty for one in arguments), name


MARKS = [".", "!", "[", "(", "<<", "*", "\n", " ", "A.", '"', "'", "-", "#", ",", "* ", "\u3000", "😀", "<i>"]
RUNS = [*MARKS, "a", "the ", "Question 1", "12", "é", "a-"]
EACH = 200_000 // len(RUNS)
DEGENERATE = ["x".join(run * (EACH // len(run)) for run in RUNS), "\n".join(run * (EACH // len(run)) for run in reversed(RUNS))]


@pytest.mark.parametrize("name", CHECKS)
def test_degenerate_texts_take_no_time(name: str) -> None:
    for text in DEGENERATE:
        _takes_no_time(name, text)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("detectable_format:title", "<<"),
        ("copy:repeat_phrase", "The "),
        ("format:thesis", "<i>"),
        ("custom:csv_special_character", ',"'),
        ("detectable_content:number_placeholders", "["),
        ("length_constraints:number_sentences", "! "),
        ("custom:european_capitals_sort", " "),
    ],
)
def test_one_run_takes_no_time(name: str, run: str) -> None:
    _takes_no_time(name, run * (200_000 // len(run)) + "x")


def _takes_no_time(name: str, text: str) -> None:
    follows(name, "Its tables are read by now.", FITTING.get(name, {}))
    started = time.thread_time()
    follows(name, text, FITTING.get(name, {}))
    assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    ("answer", "columns"),
    [
        ('{"func_name": "validate_end", "end_phrase": "The end.", "N": null, "quantifier": null}', {}),
        ({"func_name": "validate_end", "end_phrase": "The end.", "N": None}, {}),
        ("[{'instruction_id': ['startend:end_checker', 'punctuation:no_comma'], 'kwargs': [{'end_phrase': 'The end.'}, None]}]", {}),
        ('[{"instruction_id": ["startend:end_checker"], "kwargs": [{"end_phrase": "The end."}]}]', {}),
        (["[{'instruction_id': ['startend:end_checker'], 'kwargs': [{'end_phrase': 'The end.'}]}]"], {}),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "The end.", "N": None}]}, {}),
        (None, {"ground_truth": '{"func_name": "validate_end", "end_phrase": "The end."}'}),
        ("anything", {"instruction_id_list": ["startend:end_checker"], "kwargs": ['{"end_phrase": "The end."}']}),
        ([{"func_name": "validate_end", "end_phrase": "The end."}, {"func_name": "validate_no_commas"}], {}),
    ],
)
def test_rows_in_the_forms_of_the_data_sets(answer: Any, columns: dict[str, Any]) -> None:
    assert InstructionReward()(item("So it was. The end.", answer, **columns)).value == 1
    assert InstructionReward()(item("The end, it was.", answer, **columns)).value == 0


def test_values_of_a_table_may_be_floats_and_arrays() -> None:
    table = {
        "instruction_id": np.array(["count:numbers", "keywords:existence"]),
        "kwargs": [{"N": np.int64(2)}, {"keywords": np.array(["1"])}],
    }
    assert InstructionReward()(item("1 2", table)).value == 1
    share = {"instruction_id": ["ratio:stop_words"], "kwargs": [{"percentage": np.int64(50)}]}
    assert InstructionReward()(item("cats", share)).value == 1
    assert InstructionReward()(item("1 2", {"instruction_id": ["count:numbers"], "kwargs": [{"N": 2.0, "word": None}]})).value == 1


@pytest.mark.parametrize(("answer", "columns", "problem"), cases("rewards/instruction_refused"))
def test_bad_rows_are_failures(answer: Any, columns: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardFailed, match=problem):
        InstructionReward()(item("some text", answer, **columns))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. 😀 Two! ...", ["One.", "😀 Two! ..."]),
        ('He said "no." Then he left', ['He said "no."', "Then he left"]),
        ("My answer is no. It is 5. See No. 7, U.S. and J. Doe.", ["My answer is no.", "It is 5.", "See No. 7, U.S. and J. Doe."]),
        ("... 1", ["1"]),
        ("-", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_words() -> None:
    assert words("Well-known, don't—and/or… _3.14_ $5 ( ) 😀") == ["wellknown", "dont", "and", "or", "314", "5"]


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("cat", 1),
        ("water", 2),
        ("little", 2),
        ("have", 1),
        ("the", 1),
        ("beautiful", 3),
        ("makes", 1),
        ("wanted", 2),
        ("walked", 1),
        ("free", 1),
        ("Zoë", 1),
    ],
)
def test_syllables(word: str, count: int) -> None:
    assert syllables(word) == count
