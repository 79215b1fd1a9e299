"""Rows as the well-known data sets have them, each with a right program and a wrong one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.reward import CodeReward

MBPP = {
    "text": "Write a function to find the shared elements from the given two lists.",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_SANITIZED = {"test_imports": ["import math"], "test_list": ["assert math.isclose(volume_sphere(10), 4188.7902, rel_tol=0.001)"]}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\ndef has_close_elements(numbers: List[float], threshold: float) -> bool:\n",
    "entry_point": "has_close_elements",
    "test": """

METADATA = {
    'author': 'jt',
    'dataset': 'test'
}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False

""",
}
CLOSE = """
from typing import List
def has_close_elements(numbers: List[float], threshold: float) -> bool:
    numbers = sorted(numbers)
    return any(b - a < threshold for a, b in zip(numbers, numbers[1:]))
"""
APPS_STDIN = {"inputs": ["3\n1 2 3\n", "1\n-4\n"], "outputs": ["6\n", "-4\n"]}
APPS_CALL = {"fn_name": "total", "inputs": [[[1, 2, 3]], [[]]], "outputs": [[6], [0]]}
TACO_LINES = {"inputs": [["3", "1 2 3"]], "outputs": [["6"]]}
LCB_STDIN = [{"input": "3\n1 2 3\n", "output": "6\n", "testtype": "stdin"}]
LCB_CALL = [{"input": "[2, 7, 11]\n9", "output": "[0, 1]", "testtype": "functional"}]
LEETCODE = {
    "entry_point": "Solution().twoSum",
    "test": "def check(candidate):\n    assert candidate(nums = [2, 7, 11],target = 9) == [0, 1]\n",
}
KODCODE = "from solution import double\n\ndef test_double():\n    assert double(2) == 4\n\ndef test_zero():\n    assert double(0) == 0\n"
SUM_STDIN = "n = int(input())\nprint(sum(map(int, input().split())))"
TWO_SUM = """
class Solution:
    def twoSum(self, nums: list[int], target: int) -> list[int]:
        seen = {}
        for i, one in enumerate(nums):
            if target - one in seen:
                return [seen[target - one], i]
            seen[one] = i
"""


def score(program: str, answer: Any, columns: dict[str, Any] | None = None, **args: Any) -> Score | RewardFailed:
    response = f"Thus:\n\n```python\n{program}\n```\n"
    [found] = CodeReward(**args)([RewardInput("code", "", response, answer, columns or {}, "stop")])
    return found


def value(program: str, answer: Any, columns: dict[str, Any] | None = None, **args: Any) -> float:
    found = score(program, answer, columns, **args)
    assert isinstance(found, Score), found
    return found.value


@pytest.mark.parametrize(
    ("answer", "columns", "right", "wrong"),
    [
        (MBPP, {}, "def similar_elements(a, b): return tuple(set(a) & set(b))", "def similar_elements(a, b): return a"),
        (MBPP["test_list"], MBPP, "def similar_elements(a, b): return set(a) & set(b)", "def set(x): return 0"),
        (MBPP_SANITIZED, {}, "import math\ndef volume_sphere(r): return 4 / 3 * math.pi * r**3", "def volume_sphere(r): return 4 * r**3"),
        (["assert sum(10,15) == 6"], {}, "import math\ndef sum(a, b): return {1: 1, 5: 6}[math.gcd(a, b)]", "x = sum"),
        (HUMAN_EVAL["test"], HUMAN_EVAL, CLOSE, CLOSE.replace("<", "<= 10 *")),
        (HUMAN_EVAL, {}, CLOSE, "def has_close_elements(*a): return False"),
        (json.dumps(APPS_STDIN), {}, SUM_STDIN, "print(6)"),
        (json.dumps(APPS_CALL), {}, "def total(xs): return sum(xs)", "def total(xs): return 6"),
        (json.dumps(APPS_CALL), {}, "class Solution:\n    def total(self, xs): return [sum(xs)]", "def total(xs): return [[sum(xs)]]"),
        (json.dumps(TACO_LINES), {}, SUM_STDIN, "print(input())"),
        (json.dumps(LCB_STDIN), {"metadata": "{}", "starter_code": ""}, SUM_STDIN, "print(5)"),
        (json.dumps(LCB_CALL), {"metadata": '{"func_name": "twoSum"}'}, TWO_SUM, TWO_SUM.replace(", i]", ", 0]")),
        (LEETCODE, {}, TWO_SUM, TWO_SUM.replace(", i]", ", 0]")),
        (KODCODE, {}, "def double(x): return 2 * x", "def double(x): return 4"),
    ],
)
def test_rows(answer: Any, columns: dict[str, Any], right: str, wrong: str) -> None:
    assert (value(right, answer, columns), value(wrong, answer, columns)) == (1.0, 0.0)


def test_a_value_in_a_list_of_its_own_is_the_value_where_all_of_a_samples_are() -> None:
    bare, listed = "def f(x): return x", "def f(x): return [x]"
    apps = {"fn_name": "f", "inputs": [[5], [7]], "outputs": [[5], [7]]}
    assert value(bare, apps) == value(listed, apps) == 1.0
    for truly_lists in (
        {"fn_name": "f", "inputs": [[5]], "outputs": [[5, 5]]},
        {"fn_name": "f", "inputs": [["5"], ["7"]], "outputs": [["5"], []]},
        [{"fn_name": "f", "input": [5], "output": [5]}],
        [{"fn_name": "f", "input": "5", "output": "[5]"}],
        [{"fn_name": "f", "args": [5], "expected": [5]}],
    ):
        assert value(bare, truly_lists) == 0.0, truly_lists
    assert value(listed, [{"fn_name": "f", "input": [5], "output": [5]}]) == 1.0


def test_a_functional_test_without_a_function_is_a_failure() -> None:
    found = score(TWO_SUM, json.dumps(LCB_CALL))
    assert isinstance(found, RewardFailed) and "KeyError: 'fn_name'" in found.cause


def test_iterators_that_a_call_returns_are_lists() -> None:
    calls = {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[2, 4]]}
    assert value("def f(xs): return map(lambda x: 2 * x, xs)", calls) == 1.0
    assert value("def f(xs):\n    for x in xs: yield x", calls) == 0.0
    assert value("def f(xs):\n    while True: yield 2", calls, test_s=0.3, memory_mb=128) == 0.0


def test_values_that_are_only_expensive_to_look_at_are_wrong() -> None:
    calls = {"fn_name": "f", "inputs": [[1]], "outputs": [[0, 1]]}
    for much in ("range(10**30)", "range(10**15)", "10**300000", "__import__('decimal').Decimal('1e999999')", "[[]] * 10**5"):
        assert value(f"def f(x): return {much}", calls) == 0.0, much


def test_a_prelude_stands_before_the_program() -> None:
    calls = {"fn_name": "Solution.double", "inputs": [[[1]]], "outputs": [[2]]}
    program = "class Solution:\n    def double(self, xs: List[int]) -> List[int]: return [2 * x for x in xs]"
    assert value(program, calls) == 0.0, "as in Python: List is no name of its own"
    found = score(program, calls, prelude="from typing import *")
    assert isinstance(found, Score) and found.value == 1.0 and found.details["extracted"] == f"{program}\n"


def test_a_program_may_begin_with_imports_from_the_future_below_a_prelude() -> None:
    program = "from __future__ import annotations\ndef f(x: List[Nothing]): return 2 * x"
    assert value(program, {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, prelude="from typing import *") == 1.0


def test_what_is_expected_may_be_longer_than_what_a_program_may_print() -> None:
    long = "x" * 300_000
    assert value("print('x' * 300_000)", {"stdin": "", "stdout": long}, output_kb=64) == 1.0
    assert value("print('x' * 900_000)", {"stdin": "", "stdout": long}, output_kb=64) == 0.0
    calls = {"fn_name": "f", "inputs": [[1]], "outputs": [list(range(50_000))]}
    assert value("def f(x): return list(range(50_000))", calls, output_kb=64) == 1.0


ROTATE = {"fn_name": "rotate", "inputs": [[[1, 2, 3], 1], [[5], 1]], "outputs": [[3, 1, 2], [5]]}


@pytest.mark.parametrize(
    ("body", "points"),
    [("xs[:] = xs[-k:] + xs[:-k]", 1.0), ("return xs[-k:] + xs[:-k]", 1.0), ("pass", 0.0), ("xs[:] = xs[-k:] + xs[:-k]; return 0", 0.0)],
)
def test_functions_that_work_in_place(body: str, points: float) -> None:
    assert value(f"def rotate(xs, k): {body}", ROTATE) == points


def test_doing_nothing_is_not_working_in_place() -> None:
    unchanged = {"fn_name": "f", "inputs": [[[1, 2]], [[3]]], "outputs": [[1, 2], [3]]}
    assert value("def f(xs): return sorted(xs)", unchanged) == 1.0
    assert value("def f(xs): pass", unchanged) == 0.0
