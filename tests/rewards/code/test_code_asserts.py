"""Assert-style tests of the reward `code`: whose names they use, what crosses, what a program cannot forge, what is no verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.names import Names, names_of
from roll_lite.rewards.code.reward import CodeReward

PACKAGES = str(Path(numpy.__file__).parents[1])


def verdict(program: str, tests: Any, columns: dict[str, Any] | None = None, **args: Any) -> str:
    """`passed`, what failed, or `cause: ...` of a failure."""
    [score] = CodeReward(**args)([RewardInput("code", "", program, tests, columns or {}, "stop")])
    if isinstance(score, RewardFailed):
        return f"cause: {score.cause}"
    assert isinstance(score, Score)
    said = str(score.details["verdict"])
    assert (score.value == 1.0) == (said == "passed")
    return said


# ---------------------------------------------------------------- names


def test_a_function_named_like_one_of_pythons_is_the_programs() -> None:
    tests = ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]
    divisors = """
def sum(a, b):
    found = 0
    for i in range(1, min(a, b) + 1):
        found += i if a % i == b % i == 0 else 0
    return found
"""
    assert verdict(divisors, tests) == "passed"
    assert verdict("def sum(a, b): return a + b", tests).startswith("test 1: failed: AssertionError at assert sum(10, 15) == 6")
    assert "name 'sorted' is not defined" in verdict("x = 1", "assert sorted([2, 1]) == [1, 2]")
    assert verdict("def bisect(a): return a", "assert bisect(3) == 3") == "passed"


def test_names_that_the_tests_do_not_leave_to_the_program_are_not_the_programs() -> None:
    cheat = "def abs(x): return 0\ndef set(x): return 0\ndef isclose(*a, **k): return True\ndef f(x): return 0\n"
    assert "AssertionError" in verdict(cheat, "assert abs(f(2) - 5) < 1")
    assert "AssertionError" in verdict(cheat, ["assert set([f(2)]) == set([1])"])
    assert "AssertionError" in verdict(cheat, "from math import isclose\nassert isclose(f(2), 5)")


def test_modules_are_the_tests_own_even_where_they_are_not_imported() -> None:
    replaced = "import math, sys\nmath.isclose = lambda *a, **k: True\nmath.pi = 0\nsys.modules['math'] = math\ndef f(x): return 0\n"
    owned = "class math:\n    pi = 0\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0\n"
    for cheat in (replaced, owned):
        for tests in ("assert math.isclose(f(2), math.pi)", "import math\nassert math.isclose(f(2), math.pi)"):
            assert "AssertionError" in verdict(cheat, tests)
    assert verdict("def f(x): return 3.14159265358979", "assert math.isclose(f(2), math.pi)") == "passed"


def test_whose_names_are_told_from_the_tests() -> None:
    assert names_of(["assert f(1) == math.pi + len('a')"]) == [Names(("f",), {"math": "math"})]
    assert names_of(["from solution import f as g\nassert g(1) == 2", "import solution\nassert solution.h(1)"]) == [
        Names(("f",), {}),
        Names(("h",), {}),
    ]
    assert names_of(["assert set(sum([1])) == {1}"], "sum")[0].program == ("sum",)
    with pytest.raises(ValueError, match="set or sum: which is the program's"):
        names_of(["assert set(sum([1])) == {1}"])
    with pytest.raises(ValueError, match="use no function of the program's"):
        names_of(["assert 1 == 1"])


def test_tests_that_leave_the_calls_to_a_harness() -> None:
    unit = "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
    assert verdict("def f(x): return x + 1", unit) == "passed"
    assert verdict("def f(x): return 2", unit, score="fraction").startswith("test 2: failed: AssertionError at assert f(2) == 3")
    assert "cannot import name 'f'" in verdict("def g(x): return 2", unit)
    assert "the tests cannot be read: KeyError: 'entry_point'" in verdict("def f(x): return 1", "def check(c):\n    assert c(1) == 2")
    for runner in ("def test_b(x): assert f(x) == x", "async def test_b(): pass", "class TestB:\n    def test_b(self): assert f(1)"):
        assert "only a test runner could call it" in verdict("def f(x): return x + 1", f"{unit}\n{runner}")
    assert verdict("def f(x): return x", "def test_b(x):\n    assert f(x) == x\nfor i in range(3): test_b(i)") == "passed"
    uncalled = "import unittest\nclass T(unittest.TestCase):\n    def test_one(self):\n        assert f(1) == 2"
    assert verdict("def f(x): return 1", uncalled) == (
        "cause: reward code: test 1: the harness cannot do this: the tests end without having used the program"
    )


# ---------------------------------------------------------------- values

IMPORTS = """
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
"""


@pytest.mark.parametrize(
    "value",
    [
        *("Decimal('1.50')", "Fraction(1, 3)", "date(2024, 2, 29)", "datetime(2024, 2, 29, 1, 2, 3, 4)", "timedelta(days=1, seconds=3)"),
        *("datetime(2024, 1, 1, tzinfo=timezone.utc)", "time(1, 2)", "range(1, 9, 2)", "b'ab'", "bytearray(b'ab')", "{1, (2,)}"),
        *("frozenset({1})", "{frozenset({1}): Decimal(1)}", "1 + 2j", "deque([1, 2], maxlen=3)", "Counter('aab')", "OrderedDict(a=1)"),
        *("float('inf')", "10**40", "[None, (True, {'a': [1]})]"),
    ],
)
def test_values_of_the_standard_library_cross_in_both_directions(value: str) -> None:
    tests = f"{IMPORTS}\ngiven = {value}\nassert f(given) == given and type(f(given)) is type(given)\nassert kind() == type(given).__name__"
    source = "def f(x):\n    global seen\n    seen = type(x).__name__\n    return x\ndef kind(): return seen"
    assert verdict(source, tests) == "passed"
    assert "AssertionError" in verdict("def f(x): return x\ndef kind(): return 'other'", tests)


def test_arrays() -> None:
    tests = "import numpy as np\nassert f(np.array([1, 2])).shape == (2,)\nassert (f(np.arange(3)) == np.array([0, 2, 4])).all()"
    assert verdict("def f(x): return x * 2", tests, python_path=[PACKAGES], memory_mb=4096) == "passed"
    assert "AssertionError" in verdict("def f(x): return x + 1", tests, python_path=[PACKAGES], memory_mb=4096)
    assert "the tests import what is not there: No module named 'numpy'; python_path may" in verdict("def f(x): return x", tests)


def test_packages_below_the_folder_for_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def twice(x): return 2 * x")
    tmp_path.chmod(0o755)
    tests = "from helper import twice\nassert f(3) == twice(3)"
    writes = "import os, tempfile\nopen('a', 'w').close()\ntempfile.TemporaryFile().close()\n"
    assert verdict(f"{writes}from helper import twice as f", tests, python_path=[str(tmp_path)]) == "passed"
    overwrites = f"def f(x): open({str(tmp_path / 'helper.py')!r}, 'a')"
    assert "Error: [Errno" in verdict(overwrites, tests, python_path=[str(tmp_path)])
    assert (tmp_path / "helper.py").read_text() == "def twice(x): return 2 * x"


def test_iterators_behave_as_in_one_process() -> None:
    squares = "def f(n):\n    for i in range(n): yield i * i\n"
    assert verdict(squares, "assert list(f(3)) == [0, 1, 4]\ng = f(2)\nassert next(g) == 0 and next(g) == 1") == "passed"
    assert "AssertionError" in verdict(squares, "assert f(3) == [0, 1, 4]"), "as in Python: a generator is no list"
    assert verdict("def f(xs): return next(xs) + sum(xs)", "assert f(iter([1, 2])) == f(x for x in [1, 2]) == 3") == "passed"
    assert "next() at the end of an iterator" in verdict(squares, "assert next(f(0)) == 0")
    assert verdict(squares, "assert next(f(0), None) is None and next(iter([]), 1) == 1 and next(f(2), None) == 0") == "passed"
    assert "an endless argument" in verdict("def f(xs): return 1", "import itertools\nassert f(itertools.count()) == 1")


CLASSES = """
from dataclasses import dataclass
from enum import Enum
@dataclass
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
class Color(Enum):
    RED = 1
    BLUE = 2
def color(name): return Color[name]
class Node:
    def __init__(self, value, after=None): self.value, self.after = value, after
def length(node): return 1 + length(node.after) if node else 0
class Stack(list):
    def push(self, x): self.append(x); return self
class Empty(Exception): pass
class Full(Empty, ValueError): pass
def fail(): raise Full('no', 3)
def twice(function, x): return function(function(x))
def inc(x): return x + 1
async def later(): return 1
"""


@pytest.mark.parametrize(
    "tests",
    [
        "p = Point(1, 2)\nassert (p.x, p.y) == (1, 2)\np.x = 5\nassert p.x == 5",
        "p = Point(1, 2)\nassert isinstance(p, Point) and not isinstance(p, (list, Color))",
        "assert color('RED') == Color.RED and color('RED') is Color.RED and color('RED') != Color.BLUE and Color.BLUE.value == 2",
        "n = Node(1)\nassert n.after is None and length(n) == 1 and length(None) == 0",
        "n = Node(1)\nn.after = Node(2)\nassert length(n) == 2 and n.after.value == 2",
        "s = Stack()\ns.push(1).push(2)\nassert s == [1, 2] and len(s) == 2 and s[-1] == 2 and list(s) == [1, 2] and 2 in s",
        "try: fail()\nexcept Empty as error: assert str(error) == \"('no', 3)\" and error.args == ('no', 3)\nelse: assert False",
        "try: fail()\nexcept Full: pass\nelse: assert False",
        "try: fail()\nexcept Exception as error: assert isinstance(error, Full) and type(error) == Full",
        "def fails(kind):\n    try: fail()\n    except kind: return True\nassert fails(Full)",
        "for kind in (Empty, Full):\n    try: fail()\n    except kind: pass\n    else: assert False",
        "assert Color['RED'] is Color.RED and not isinstance(inc(1), Point)",
        "try: fail()\nexcept ValueError: pass\nelse: assert False",
        "try: fail()\nexcept TypeError: assert False\nexcept (KeyError, ValueError): pass",
        "assert twice(inc, 3) == 5 and callable(inc) and not callable(Node(1)) and twice(abs, -3) == 3 and twice(list, 'ab') == ['a', 'b']",
        "assert inc.__name__ == 'inc' and inc.__doc__ is None and Node(1).__dict__ == vars(Node(1)) == {'value': 1, 'after': None}",
    ],
)
def test_classes_of_the_program(tests: str) -> None:
    assert verdict(CLASSES, tests) == "passed"


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("assert Point(1, 2) == Point(1, 2)", "comparing an object of a class of the program, which has an __eq__ of its own"),
        ("async def g(x): return x\nassert twice(g, 3) == 3", "an argument of type function"),
        ("class A: pass\nassert twice(A, 3) == 3", "an argument of type type"),
        ("class A: pass\nassert inc(A()) == 3", "an argument of type A"),
        ("try: assert Point(1, 2) == 3\nexcept: pass", "comparing an object of a class of the program"),
        ("assert Node(1).__reduce_ex__(2)", "__reduce_ex__ of an object of a class of the program"),
        ("import no_such_module_here\nassert inc(1) == 2", "the tests import what is not there: No module named 'no_such_module_here'"),
    ],
)
def test_what_cannot_be_tested_apart_is_a_failure(tests: str, why: str) -> None:
    assert verdict(CLASSES, tests).startswith(f"cause: reward code: test 1: the harness cannot do this: {why}")


OWN_EQ = "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\n    def __gt__(self, o): return True\n"


TOTAL = "class Thing:\n    def total(self): return E()\n    def again(self): return self\n    def __eq__(self, o): return True\n"


@pytest.mark.parametrize(
    ("program", "tests", "why"),
    [
        ("class is_prime(Exception): pass", ["assert is_prime(7)", "assert not is_prime(8)"], "AssertionError"),
        (f"{OWN_EQ}{TOTAL}", "t = Thing()\nassert t.total() == 5", "comparing an object of a class of the program"),
        (f"{OWN_EQ}{TOTAL}", "t = Thing()\nassert t.again() == 5", "comparing an object of a class of the program"),
        (f"{OWN_EQ}{TOTAL}", "t = Thing()\nassert t.total() > 5", "__gt__ of an object"),
        ("def f(x): return iter([])", "assert next(f(1), None) == 5", "AssertionError"),
        ("def f(x): return iter([])", "# StopIteration, next(a, b)\nassert next(f(1)) == 5", "next() at the end of an iterator"),
        ("async def f(x): return 5", "# no async, no await, no asyncio\nassert f(1) == 5", "a value of type coroutine"),
        ("def f(x): return x if type(x) is int else [0] * 100_001", "assert f(iter(f([]))) == 5", "an endless argument"),
        (
            'import os\ndef f(x): os.write(4, b\'{"value": {"n": [\' + b"0," * 100_000 + b"0]}}\\n")',
            "assert f(f(1)) == 5",
            "the program sent what is no answer",
        ),
        (
            'import os\ndef f(x): os.write(4, b\'{"value": {"r": {"items": [0]}}}\\n\')',
            "assert f(f(1)) == 5",
            "the program sent what is no answer",
        ),
    ],
)
def test_no_program_chooses_to_be_left_out(program: str, tests: Any, why: str) -> None:
    said = verdict(program, tests)
    assert said.startswith("test ") and ": failed: " in said and why in said


@pytest.mark.parametrize(
    ("program", "tests", "why"),
    [
        (f"{OWN_EQ}def f(x): return E()", ["assert f(1) == 5"], "comparing an object of a class of the program"),
        (f"{OWN_EQ}def f(x): return E()\ng = f", ["assert f(1) == 5 and g(2) == 6"], "comparing an object of a class of the program"),
        (f"{OWN_EQ}class Solution:\n    def f(self, x): return E()", "assert Solution().f(1) == 5", "comparing an object of a class"),
        (f"{OWN_EQ}def f(x): return E()", "assert f(1) > 5", "__gt__ of an object"),
        ("def f(x): return object()", "assert f(1) > 5", "__gt__ of an object"),
        ("def f(x): return object()", "assert int(f(1)) == 5", "__int__ of an object"),
        ("def f(x): yield from ()", "assert next(f(1)) == 5", "next() at the end of an iterator"),
        ("async def f(x): return 5", "assert f(1) == 5", "a value of type coroutine, which has to be awaited"),
        ("def f(x): return 'x' * 9_000_000", "assert f(1) == 5", "a value of more than 8 MB"),
        ('import os\nos.write(4, b\'{}\\n{"cannot": "x"}\\n\' * 9)\ndef f(x): return 5', "assert f(1) == 5", "'f' is not defined"),
        ('import os\ndef f(x): os.write(4, b\'{"cannot": "x"}\\n\')', "assert f(1) == 5", "the program sent what is no answer"),
        ('import os\ndef f(x): os.write(4, b\'{"value": {"r": "x"}}\\n\')', "assert f(1) == 5", "the program sent what is no answer"),
        ("import os\ndef f(x): os.write(4, b'{\"error\": 5}\\n')", "assert f(1) == 5", "the program sent what is no answer"),
    ],
)
def test_what_a_program_brings_about_is_wrong_and_no_failure(program: str, tests: Any, why: str) -> None:
    said = verdict(program, tests)
    assert said.startswith("test 1: failed: ") and why in said
    caught = f"try:\n    {tests if isinstance(tests, str) else tests[0]}\nexcept BaseException: pass".replace("\nassert", "\n    assert")
    assert why in verdict(program, caught) or "not defined" in why


def test_views_of_dicts_are_compared_as_sets() -> None:
    assert verdict("def f(d): return d.keys()", "assert f({1: 2}) == {1}\nassert f({1: 2}) != {2}") == "passed"
    assert verdict("def f(d): return d.items()", "assert f({1: 2}) == {(1, 2)}") == "passed"
    assert "AssertionError" in verdict("def f(d): return d.values()", "assert f({1: 2}) == {2}")


def test_arguments_may_have_any_name() -> None:
    names = ("self", "target", "what", "name")
    source = f"def f(what, {', '.join(name for name in names if name != 'what')}): return [what, target, self, name]"
    assert verdict(source, "assert f(self=1, target=2, what=3, name=4) == [3, 2, 1, 4]") == "passed"


def test_arguments_that_a_function_changes() -> None:
    source = "def f(a, b=None):\n    a.append(1)\n    if b is not None: b['k'] = a"
    assert verdict(source, "a, b = [], {}\nf(a, b=b)\nassert a == [1] and b == {'k': [1]}") == "passed"


# ---------------------------------------------------------------- exceptions, forgeries


@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt"])
def test_no_exception_of_the_program_ends_a_loop_of_the_tests(kind: str) -> None:
    source = f"class Done({kind}): pass\ndef f(x): raise {kind}\ndef g(x): raise Done"
    for tests in (
        "assert all(map(f, [1, 2]))",
        "assert all(map(g, [1, 2]))",
        "assert list(map(f, [1])) == []",
        "for x in map(f, [1]): assert 0",
    ):
        assert verdict(source, tests).startswith("test 1: failed: "), tests


def test_a_program_that_ends_during_its_tests_fails_whatever_they_catch() -> None:
    source = "import sys\ndef f(x): sys.exit(0)"
    assert "the program ended during its tests" in verdict(source, "try: assert f(1)\nexcept: pass")
    assert "the program ended before its tests: SyntaxError" in verdict("def f(:", "assert f(1)")


@pytest.mark.parametrize("kind", ["ValueError", "KeyError", "ZeroDivisionError", "AssertionError", "IndexError", "OSError", "UnicodeError"])
def test_exceptions_of_python_keep_their_type(kind: str) -> None:
    tests = f"try: f(1)\nexcept {kind} as error: assert error.args == ('why',)\nelse: assert False"
    assert verdict(f"def f(x): raise {kind}('why')", tests) == "passed"
    assert "TypeError: other" in verdict("def f(x): raise TypeError('other')", tests)
    module = "import json\ntry: f('{')\nexcept json.JSONDecodeError: pass\nelse: assert False"
    assert verdict("import json\ndef f(x): return json.loads(x)", module) == "passed"


@pytest.mark.parametrize(
    "cheat",
    [
        "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\n    def __sub__(self, o): return 0\ndef f(x): return E()",
        "class E(int):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\ndef f(x): return E(0)",
        "class E(float):\n    def __rsub__(self, o): return 0\n    def __abs__(self): return 0\ndef f(x): return E(0)",
        "class E(list):\n    def __eq__(self, o): return True\n    def __abs__(self): return 0\ndef f(x): return E()",
        "class E:\n    def __class__(self): return int\ndef f(x): return E()",
        "def f(x): raise StopIteration",
        'import os\ndef f(x):\n    os.write(4, b\'{"cannot": 1, "value": true}\\n\')\n    os._exit(0)',
        "import os\nos.write(4, b'{\"value\": true}\\n' * 99)\ndef f(x): return 0",
        "import os\nos.write(3, b'{\"value\": true}')\nos._exit(0)",
        "import builtins\nbuiltins.abs = builtins.AssertionError = lambda *a: 0\ndef f(x): return 0",
    ],
)
def test_forged_verdicts(cheat: str) -> None:
    for tests in ("assert f(20) == 42", "assert abs(f(20) - 42) < 1e-6", "assert f(20) in [42]", "assert not (f(20) != 42)"):
        assert verdict(cheat, tests) != "passed"


EVEN = "r = f([3, 1, 2])\nassert len(r) == 3\nfor a, b in zip(r, [1, 2, 3]): assert a == b"
PRIME = "r = f(91)\nassert 91 % r == 0\nassert r != 1 and r != 91\nassert r > 1"
EMPTY = (
    "    def __iter__(self): return iter(())\n    def __len__(self): return 3\n    def __getitem__(self, i): return 0\ndef f(x): return L()"
)
SPEAKS = """
import json, os
def f(x):
    def say(value): os.write(4, json.dumps({'value': value}).encode() + bytes([10]))
    say({'r': 0})
    for line in iter(lambda: json.loads(os.read(4, 99999)), None):
        asked = line['args'][0] if line['args'] else line['do']
        say(ANSWERS(asked))
"""


@pytest.mark.parametrize("base", ["", "(list)", "(tuple)", "(dict)", "(set)"])
@pytest.mark.parametrize("tests", [EVEN, f"import math\n{EVEN}\nassert math.pi > 3 or r.pi"])
def test_no_object_has_a_length_and_no_items(base: str, tests: str) -> None:
    said = verdict(f"class L{base}:\n    pi = 4\n{EMPTY}", tests)
    assert said.startswith("test 1: failed: ")
    assert "AssertionError" in said or "the length 3 and 0 items" in said


@pytest.mark.parametrize(
    "answers",
    [
        "lambda asked: {'t': [1]} if asked == '__rmod__' else {'t': ['plain', 7.5]} if asked == 'how to compare' else {'t': [7.5]}",
        "lambda asked: {'t': [1]} if asked == '__rmod__' else {'t': ['itself']} if asked == 'how to compare' else {'t': [7.5]}",
        "lambda asked: {'t': [{'r': 1}]} if asked == '__rmod__' else {'t': ['itself']} if asked == 'how to compare' else {'t': [7.5]}",
    ],
)
def test_no_object_is_one_value_here_and_another_there(answers: str) -> None:
    said = verdict(f"ANSWERS = {answers}{SPEAKS}", PRIME)
    assert said.startswith("test 1: failed: an object of the program ")
    honest = "lambda asked: {'t': ['plain', 7]} if asked == 'how to compare' else {'t': [7]}"
    assert verdict(f"ANSWERS = {honest}{SPEAKS}", PRIME) == "passed"


def test_no_object_answers_differently_the_second_time() -> None:
    program = "class L:\n    n = 0\n    def __len__(self):\n        self.n += 1\n        return self.n\ndef f(x): return L()"
    assert "AssertionError" in verdict(program, "r = f(1)\nassert len(r) == 2")
    assert "the program sent what is no answer" in verdict(program, "r = f(1)\nassert len(r) == 1\nassert len(r) == 2")


def test_objects_that_change_may_say_so() -> None:
    program = """
from collections import namedtuple
Pair = namedtuple('Pair', 'x y')
def pair(x): return Pair(x, [x])
class Box(list):
    def __len__(self): return list.__len__(self)
    def put(self, x): self.append(x)
def box(): return Box()
class Bag:
    def __init__(self): self.items = []
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
def bag(): return Bag()
class Upper(dict):
    def __getitem__(self, key): return dict.__getitem__(self, key)
def upper(): return Upper(a=1)
"""
    for tests in (
        "p = pair(1)\nassert p.x == 1 and p == (1, [1])\np.y.append(2)\nassert repr(p) == 'Pair(x=1, y=[1, 2])' and list(p) == [1, [1, 2]]",
        "b = box()\nassert len(b) == 0\nb.put(1)\nassert len(b) == 1 and b == [1]\nb.put(2)\nassert list(b) == [1, 2] and b == [1, 2]",
        "b = bag()\nassert len(b) == 0\nb.items.append(1)\nassert list(b) == [1] and len(b) == 1 and 1 in b",
        "assert upper() == {'a': 1} and upper()['a'] == 1 and dict(upper()) == {'a': 1} and isinstance(upper(), dict)",
    ):
        assert verdict(program, tests) == "passed", tests


RICH = """
class Failed(Exception):
    def __init__(self, code):
        self.code = code
        self.source = object()
    def __str__(self): return f'code {self.code}'
class Quiet(ValueError):
    def __str__(self): return 'quiet'
class Missing(KeyError): pass
def miss(): raise Missing('k')
def fail(): raise Failed(5)
def fail_quietly(): raise Quiet('loud')
class Evens:
    def __contains__(self, x): return x % 2 == 0
class Point:
    def __init__(self): self.x = 1
class All:
    def __contains__(self, x): return True
    def __iter__(self): return iter([1])
def every(): return All()
"""


@pytest.mark.parametrize(
    "tests",
    [
        "try: fail()\nexcept Failed as e: assert e.code == 5 and str(e) == 'code 5' and type(e) == Failed\nelse: assert False",
        "try: fail()\nexcept Exception as e: assert e.code == 5 and str(e) == 'code 5'\nelse: assert False",
        "try: fail_quietly()\nexcept ValueError as e: assert str(e) == 'quiet' and e.args == ('loud',)\nelse: assert False",
        "try: miss()\nexcept Missing as e: assert str(e) == repr('k')\nelse: assert False",
        "e = Evens()\nassert 2 in e and 3 not in e",
        "assert 1 in every() and 2 not in every()",
        "p = Point()\nassert type(p).__name__ == 'Point' and type(1).__name__ == 'int' and type(p.x).__name__ == 'int'",
        "p = Point()\ndel p.x\nassert not hasattr(p, 'x')",
    ],
)
def test_what_objects_and_exceptions_of_the_program_say_of_themselves(tests: str) -> None:
    assert verdict(RICH, tests) == "passed"
    assert verdict(RICH, f"{tests}\nassert fail_quietly is None").startswith("test 1: failed: AssertionError")
