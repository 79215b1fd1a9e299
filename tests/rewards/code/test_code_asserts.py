"""Assert-style tests of the reward `code`: whose names they use, what crosses, what a program cannot forge, what is no verdict.

`asserts.jsonl` holds cases: a program (or the name of one that several use), tests, the verdict, and whether it is decided inside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.names import Asserts, asserts_of
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


ROWS = [json.loads(line) for line in (Path(__file__).parent / "asserts.jsonl").read_text(encoding="utf-8").splitlines()]
PROGRAMS = {row["name"]: row["program"] for row in ROWS if "name" in row}
CASES = [row for row in ROWS if "case" in row]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("row", CASES, ids=[f"{row['case']}-{place}" for place, row in enumerate(CASES)])
def test_cases(row: dict[str, Any]) -> None:
    program = row["program"] if "program" in row else PROGRAMS[row["use"]]
    [score] = CodeReward(**row.get("args", {}))([RewardInput("code", "", program, row["tests"], {}, "stop")])
    found = "failed" if isinstance(score, RewardFailed) else "passed" if score.value == 1.0 else "wrong"
    assert found == row["verdict"], score
    assert isinstance(score, RewardFailed) or bool(score.details.get("inside")) == row.get("inside", False), score


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
    taken, added = "assert f(1) == math.pi + len('a')", "import math as math"
    assert asserts_of([taken]) == [Asserts(f"{added}\n{taken}", ("f",), (added,))]
    assert [one.names for one in asserts_of(["from solution import f as g\nassert g(1)", "import solution\nassert solution.h(1)"])] == [
        ("f",),
        ("h",),
    ]
    assert asserts_of(["assert set(sum([1])) == {1}"], "sum")[0].names == ("sum",)
    with pytest.raises(ValueError, match="set or sum: which is the program's"):
        asserts_of(["assert set(sum([1])) == {1}"])
    with pytest.raises(ValueError, match="use no function of the program's"):
        asserts_of(["assert 1 == 1"])


def test_tests_that_leave_the_calls_to_a_harness() -> None:
    unit = "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
    assert verdict("def f(x): return x + 1", unit) == "passed"
    assert verdict("def f(x): return 2", unit, score="fraction").startswith("test 2: failed: AssertionError at assert f(2) == 3")
    assert "cannot import name 'f'" in verdict("def g(x): return 2", unit)
    assert "the tests cannot be read: KeyError: 'entry_point'" in verdict("def f(x): return 1", "def check(c):\n    assert c(1) == 2")
    for runner in ("def test_b(x): assert f(x) == x", "async def test_b(): pass"):
        assert "only a test runner could call it" in verdict("def f(x): return x + 1", f"{unit}\n{runner}")
    assert verdict("def f(x): return x", "def test_b(x):\n    assert f(x) == x\nfor i in range(3): test_b(i)") == "passed"


UNITTEST = """
import unittest
class T(unittest.TestCase):
    def setUp(self): self.x = 1
    def test_one(self):
        self.assertEqual(f(self.x), 2)
"""
MAIN = "if __name__ == '__main__':\n    unittest.main()"
PYTEST = "class TestF:\n    def setup_method(self): self.x = 1\n    def test_one(self):\n        assert f(self.x) == 2"


@pytest.mark.parametrize("tests", [UNITTEST, PYTEST, UNITTEST + MAIN, f"{UNITTEST}unittest.main()"])
def test_classes_of_tests_run_as_a_test_runner_runs_them(tests: str) -> None:
    assert verdict("def f(x): return x + 1", tests) == "passed"
    for wrong in ("def f(x): return 1", "import unittest\ndef f(x): raise unittest.SkipTest", "def g(x): return 2", "def f(x): exit(0)"):
        said = verdict(wrong, tests)
        assert said.startswith("test 1: failed: "), said


def test_a_samples_asserts_share_what_they_change() -> None:
    counter = "n = 0\ndef count():\n    global n\n    n += 1\n    return n"
    assert verdict(counter, ["assert count() == 1", "assert count() == 2", "assert count() == 3"]) == "passed"
    account = "class Account:\n    balance = 0\n    def add(self, x): Account.balance += x"
    tests = ["Account().add(3)", "assert Account.balance == 3", "Account().add(4)\nassert Account.balance == 7"]
    assert verdict(account, tests) == "passed"


def test_asserts_that_end_the_program_leave_the_others_their_verdicts() -> None:
    source = "import time\ndef f(x):\n    if x == 1: exit(0)\n    if x == 2: time.sleep(60)\n    while x == 3: pass\n    return x"
    [score] = CodeReward(score="fraction", test_s=0.5, wall_s=3)(
        [RewardInput("code", "", source, [f"assert f({x}) == {x}" for x in range(6)], {}, "stop")]
    )
    assert isinstance(score, Score) and (score.details["passed"], score.value) == (3, 0.5), score
    [score] = CodeReward(test_s=0.5, wall_s=30, total_s=20)([RewardInput("code", "", source, ["assert f(3)", "assert f(4)"], {}, "stop")])
    assert isinstance(score, Score) and score.details["verdict"] == "test 1: time limit: too much computing"


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


# ---------------------------------------------------------------- forgeries

AREA = """
class Area:
    def __init__(self, r): pass
    def __sub__(self, other): return 0.0
    def __lt__(self, other): return True
    def __eq__(self, other): return True
    def __abs__(self): return self
    def __contains__(self, other): return True
    __rsub__ = __add__ = __mod__ = __truediv__ = __sub__
    __le__ = __gt__ = __ge__ = __lt__
    def area(self): return self
"""
DECIDED_BY_OPERATORS = [
    "assert abs(Area(3) - 28.274) < 1e-3",
    "assert Area(3) == 28.274",
    "assert not (Area(3) != 28.274)",
    "assert Area(3) < 5",
    "assert Area(3) in [28.274]",
    "assert [Area(3)] == [28.274]",
    "x = Area(3)\nassert x == 28.274",
    "import math\nassert math.isclose(Area(3), 28.274)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(Area(3), 28.274)",
]
LIES = {
    "its module": "class E(Area):\n    __module__ = 'builtins'",
    "the module of its metaclass": "class M(type):\n    __module__ = property(lambda c: 'builtins')\nclass E(Area, metaclass=M): pass",
    "its order of classes": "class M(type):\n    __mro__ = property(lambda c: (c,))\nclass E(Area, metaclass=M): pass",
    "its names": "class M(type):\n    __dict__ = property(lambda c: {})\nclass E(Area, metaclass=M):\n    __eq__ = Area.__eq__",
    "its operators": "class E:\n    __module__ = 'builtins'\n    __eq__ = __lt__ = __gt__ = bool\n    __hash__ = None",
}
"""Classes whose objects equal everything and that are, by what they say of themselves, not the program's."""
NEEDS_AN_OBJECT = ["assert Area(3).area() {}", "a = Area(3)\nassert a.area() {}"]


@pytest.mark.parametrize("tests", DECIDED_BY_OPERATORS)
def test_no_operator_of_a_program_decides(tests: str) -> None:
    """Although its name has a capital. The response alone brings it about: a score, not a failure."""
    said = verdict(AREA, tests)
    assert said.startswith("test 1: failed: "), said
    assert verdict("class Area(float):\n    def __eq__(self, o): return True\n    __hash__ = None", "assert Area(3) == 28.274") != "passed"


@pytest.mark.parametrize("tests", NEEDS_AN_OBJECT)
@pytest.mark.parametrize("check", ["== 28.274", "- 28.274 == 0", "< 5", "in [28.274]", "% 5 == 0", "/ 2 == 0"])
def test_operators_inside_see_no_plain_value(tests: str, check: str) -> None:
    said = verdict(AREA, tests.format(check))
    assert said.startswith("test 1: failed: "), said
    assert verdict("class Area:\n    def __init__(self, r): self.r = r\n    def area(self): return 7.0", tests.format("== 7.0")) == "passed"


@pytest.mark.parametrize("lie", LIES)
def test_what_a_class_says_of_itself_makes_no_operator_pythons_own(lie: str) -> None:
    area = AREA.replace("class Area:", "class Area:\n    __module__ = 'builtins'")
    program = f"{area}\n{LIES[lie]}\nclass P:\n    x = E({'' if lie == 'its operators' else 3})"
    assert verdict(program, "assert P().x == 28.274").startswith("test 1: failed: "), lie
    unit = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(P().x, 28.274)"
    assert verdict(program, unit).startswith("test 1: failed: "), lie


LEAVES = ["raise SystemExit(0)", "import sys; sys.exit()", "exit()", "quit(0)", "import unittest; raise unittest.case._ShouldStop"]
IN_A_CLASS = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(P().x, 5)"


@pytest.mark.parametrize("leave", LEAVES)
def test_a_program_that_leaves_a_test_inside_does_not_pass_it(leave: str) -> None:
    program = f"class P:\n    @property\n    def x(self):\n        {leave}"
    for tests in ("assert P().x == 5", IN_A_CLASS, "class TestP:\n    def test_x(self): assert P().x == 5"):
        assert verdict(program, tests).startswith("test 1: failed: "), tests
    for end in ("import sys\nsys.exit()", "raise SystemExit"):
        assert verdict("class P:\n    x = 5", f"assert P().x == 5\n{end}") == "passed"


REPLACED = {
    "a function": ("math.isclose = lambda *a, **k: True", "import math", "assert math.isclose(P().x, 5)"),
    "a function, under its own name": ("math.isclose = lambda *a, **k: True", "from math import isclose", "assert isclose(P().x, 5)"),
    "a constant": ("math.pi = 7", "", "assert P().x == math.pi"),
    "a method": ("unittest.TestCase.assertEqual = lambda *a: None", "import unittest", "{}self.assertEqual(P().x, 5)"),
    "code": ("unittest.TestCase.assertEqual.__code__ = (lambda *a: None).__code__", "import unittest", "{}self.assertEqual(P().x, 5)"),
    "a method that a class inherits": (
        "unittest.TestCase.__getattribute__ = lambda s, n: (lambda *a: None) if 'Equal' in n else object.__getattribute__(s, n)",
        "import unittest",
        "{}self.assertEqual(P().x, 5)",
    ),
    "a builtin, seen by a module": ("unittest.case.AssertionError = GeneratorExit", "import unittest", "{}self.assertEqual(P().x, 5)"),
    "a builtin": ("builtins.abs = lambda x: 0", "", "assert abs(P().x - 5) < 1"),
    "a module": ("sys.modules['statistics'] = P", "import statistics", "assert statistics.mean([P().x]) == 5"),
    "a module of a package": ("sys.modules['unittest.mock'] = P", "from unittest import mock", "assert mock.ANY == 5 and P().x == 5"),
    "a module that was not loaded": ("sys.modules['colorsys'] = P", "import colorsys", "assert colorsys.hls_to_rgb(0, P().x, 0)[0] == 5"),
}
UNIT = "class T(unittest.TestCase):\n    def test(self): "


@pytest.mark.parametrize("which", REPLACED)
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_program_replaces_nothing_that_a_test_inside_uses(which: str, when: str) -> None:
    replaced, imports, check = REPLACED[which]
    program = "import builtins, math, sys, unittest, unittest.mock\nclass P:\n    ANY = 5\n    mean = hls_to_rgb = lambda *a: [5]\n"
    program += f"    @property\n    def x(self):\n        {replaced if when == 'during' else 'pass'}\n        return 4\n"
    tests = f"{imports}\nP().x\n{check.format(UNIT)}"
    said = verdict(program + (replaced if when == "before" else ""), tests)
    assert said.startswith("test 1: failed: "), said
    honest = "math.pi" if "math.pi" in check else 5
    assert verdict(f"import math\nclass P:\n    x = {honest}", tests.replace("mock.ANY == 5 and ", "")) == "passed"


def test_what_tests_inside_replace_they_may() -> None:
    sleep = "import time\ntime.sleep = lambda s: None\nassert P().x == 5"
    clock = "from unittest.mock import patch\nwith patch('time.time', lambda: 5): assert P().x == 5"
    program = "import time\nclass P:\n    x = property(lambda s: {})"
    assert verdict(program.format("time.sleep(9) or 5"), sleep) == verdict(program.format("time.time()"), clock) == "passed"


def test_what_a_program_has_set_up_stays_for_its_tests() -> None:
    program = "import io, os, sys, tempfile\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nsys.setrecursionlimit(9999)\nclass P:\n"
    program += "    def x(s):\n        print(5)\n        return sys.argv == ['main.py'] and tempfile.gettempdir() == os.environ['TMPDIR']"
    assert verdict(program, "import os\nassert P().x()\nassert P().x()") == "passed"


STOPS = "class P:\n    def __new__(c, *a):\n        if a: raise StopIteration\n        return object.__new__(c)\n"
NUMBERS = "class P(int):\n    said = iter([5, 5, 1, 1])\n    def __new__(c, *a): return int.__new__(c, 5)\n"


@pytest.mark.parametrize("loop", ["map(P, [1])", "filter(P, [5])", "iter(P().x, 1)", "(P().x() for _ in [1])"])
def test_a_stop_iteration_of_the_program_ends_no_loop_of_the_tests(loop: str) -> None:
    tests = f"for one in {loop}:\n    assert one == 5"
    assert verdict(f"{STOPS}    def x(s): raise StopIteration", tests).startswith("test 1: failed: RuntimeError"), loop
    assert verdict(f"{NUMBERS}    def x(s): return next(P.said)", tests) == "passed"


def test_objects_inside_are_equal_if_they_hold_the_same() -> None:
    tests = "p = Point(1, 2)\nassert p.x == 1\nassert p.moved(1) == Point(2, 2)"
    honest = "class Point:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __eq__(s, o): return (s.x, s.y) == (o.x, o.y)\n"
    assert verdict(f"{honest}    def moved(s, d): return Point(s.x + d, s.y)", tests) == "passed"
    liar = honest.replace("(s.x, s.y) == (o.x, o.y)", "True")
    assert verdict(f"{liar}    def moved(s, d): return Point(s.x, s.y)", tests).startswith("test 1: failed: AssertionError")


SPEAKS = "import json, os\ndef f(*x):\n    os.write(4, json.dumps({}).encode() + b'\\n')\n    os._exit(0)"
FORGED = [
    {"value": {"r": "f"}, "changed": []},
    {"value": {"r": None}, "changed": []},
    {"value": {"r": 10**400}, "changed": []},
    {"value": {"s": [{"r": 0}, {"r": 1}]}, "changed": []},
    {"value": {"v": ["x", []]}, "changed": []},
    {"value": {"v": ["ItemsView", [1]]}, "changed": []},
    {"value": 1, "changed": [[7, 1]]},
    {"value": 1, "changed": [["x", 1]]},
    {"value": 1, "changed": [[0, 1]]},
    {"value": 1, "changed": 5},
    {"error": 5, "changed": []},
    {"error": [], "args": [], "text": 3, "changed": []},
    {"error": ["builtins.SystemExit"], "args": [0], "text": "", "changed": []},
    {"error": ["builtins.StopIteration"], "args": [], "text": "", "changed": []},
    {"error": ["unittest.case.SkipTest"], "args": [], "text": "", "changed": []},
    {"error": ["builtins.ImportError"], "args": [], "text": "", "changed": []},
    {"cannot": "x"},
    {"token": "", "error": ""},
    {"inside": "x", "error": ""},
    {},
    [],
]


@pytest.mark.parametrize("sent", FORGED, ids=str)
@pytest.mark.parametrize("tests", ["assert f([1]) == 5", "for x in [1]:\n    assert f(x) == 5", "assert f(f([1])) == 5"])
def test_forged_answers_are_wrong(sent: Any, tests: str) -> None:
    """A program may write what it likes to the socket: it is a wrong value, never a pass or a failure."""
    said = verdict(SPEAKS.replace("{}", repr(sent), 1), tests, test_s=1.0)
    assert said.startswith("test 1: failed: "), said


def test_a_test_inside_needs_its_token() -> None:
    """What a program writes before it is asked is no verdict."""
    tests = "p = P()\nassert p.x == 5"
    for sent in ({"token": "", "error": ""}, {"names": {"P": {"r": "P"}}}, {"error": ""}):
        program = f"import json, os\nclass P:\n    x = 4\nfor _ in range(9): os.write(4, json.dumps({sent!r}).encode() + b'\\n')"
        said = verdict(program, tests)
        assert said.startswith("test 1: failed: "), said
    assert verdict("class P:\n    x = 5", tests) == "passed"


def test_a_forged_answer_moves_no_test_inside() -> None:
    cleared = SPEAKS.replace("{}", repr({"value": 1, "changed": [[0, []]]}), 1)
    [score] = CodeReward()([RewardInput("code", "", cleared, "assert f(f) == 5", {}, "stop")])
    assert isinstance(score, Score) and score.details["verdict"] == "test 1: failed: the program sent what is no answer", score
    assert "inside" not in score.details


def test_the_tests_are_in_no_frame_of_the_program_when_it_is_run() -> None:
    """What runs before the tests come cannot read them."""
    looks = "import gc, sys\nframe, seen = sys._getframe(), ''\nwhile frame: seen += repr(frame.f_locals); frame = frame.f_back\n"
    looks += "seen += repr([o for o in gc.get_objects() if type(o) in (dict, list, tuple)])\n"
    program = f"{looks}class P:\n    x = ''.join(reversed('hsifdrows')) in seen"
    assert verdict(program, "p = P()\nassert p.x == False  # swordfish") == "passed"
