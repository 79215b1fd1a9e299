"""Asserts about what a program's objects and values are, hold, print and read, as if program and tests were one process."""

from __future__ import annotations

import pytest
from rewards.code.test_code_asserts import verdict

BOX = """
class Box:
    def __init__(self): self.items, self.by_name = [], {}
    def add(self, item): self.items.append(item)
    def total(self): return sum(self.items)
    def names(self): return len(self.by_name)
"""
RETURNS_ITS_ARGUMENT = "def f(x): return x"
COPIES = "def f(x): return x[:]"
SHARED = "kept = []\ndef f(): return kept"
FRESH = "def f(): return []"
MOCKS = "from unittest.mock import patch\nimport contextlib, io, sys, unittest\n"
COLOUR = "from enum import IntEnum\nclass C(IntEnum):\n    A = 1\n    B = 2\ndef f(): return C.B"
POINT = "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)"
OWN_ORDER = "class C:\n    def __lt__(self, o): return True\n    def __gt__(self, o): return True\ndef f(): return C()"
LYING_INT = "class C(int):\n    def __lt__(self, o): return True\ndef f(): return C(9)"
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 1)\nunittest.main()"

PASS = {
    "a copy": (COPIES, "x = [1]\nassert f(x) is not x and f(x) == x"),
    "the argument": (RETURNS_ITS_ARGUMENT, "x = [1]\nassert f(x) is x"),
    "the same list again": (SHARED, "assert f() is f()"),
    "a fresh list": (FRESH, "assert f() is not f()"),
    "unittest's": (COPIES, "import unittest\nx = [1]\nunittest.TestCase().assertIsNot(f(x), x)"),
    "one of its objects": (f"{SHARED}\nclass S: pass\none = S()\ndef g(): return one", "assert g() is g()"),
    "is None": ("def f(): pass", "assert f() is None"),
    "appended by the tests": (BOX, "b = Box()\nb.items.append(3)\nb.items.append(4)\nassert b.total() == 7"),
    "an entry by the tests": (BOX, "b = Box()\nb.by_name['x'] = 1\nassert b.names() == 1"),
    "seen through another name": (BOX, "b = Box()\nitems = b.items\nb.add(5)\nassert items == [5]"),
    "changed before it raised": (
        "def f(x):\n    x.append(1)\n    raise ValueError",
        "x = []\ntry: f(x)\nexcept ValueError: pass\nassert x == [1]",
    ),
    "kept by the program": ("kept = []\ndef f(x): kept.append(x)\ndef g(): return kept[0][0]", "x = [1]\nf(x)\nx[0] = 2\nassert g() == 2"),
    "redirected": (
        "def f(): print('hi')",
        f"{MOCKS}b = io.StringIO()\nwith contextlib.redirect_stdout(b): f()\nassert b.getvalue() == 'hi\\n'",
    ),
    "patched output": (
        "def f(): print('hi')",
        f"{MOCKS}with patch('sys.stdout', new=io.StringIO()) as o: f()\nassert o.getvalue() == 'hi\\n'",
    ),
    "patched input": ("def f(): return int(input('?')) * 2", f"{MOCKS}with patch('builtins.input', return_value='4'): assert f() == 8"),
    "input in turn": (
        "def f(): return [input(), input()]",
        f"{MOCKS}with patch('builtins.input', side_effect=['a', 'b']): assert f() == ['a', 'b']",
    ),
    "input from a text": ("def f(): return input()", f"{MOCKS}sys.stdin = io.StringIO('z\\n')\nassert f() == 'z'"),
    "no input": ("def f(): return input()", "try: f()\nexcept EOFError: pass\nelse: assert False"),
    "an end that says so": ("def f(): return 1", "import sys\nassert f() == 1\nsys.exit(0)"),
    "unittest.main": ("def f(): return 1", UNITTEST),
    "an int of its own": (
        COLOUR,
        "assert f() == 2 and f() > 1 and f() + 1 == 3 and f() in {2} and sorted([3, f()]) == [2, 3] and [7, 8, 9][f()] == 9",
    ),
    "two ints of its own": (COLOUR, "assert C.A < f() and f() is C.B and f().name == 'B'"),
    "a named tuple": (
        POINT,
        "p = f()\nx, y = p\nassert p == (1, 2) == P(1, 2) and p.x == x and p < (1, 3) and {(1, 2): 5}[p] == 5 and isinstance(p, tuple)",
    ),
    "constants alone": ("MOST = 5\nNAMES = {'a': 1}", "assert MOST == 5 and NAMES['a'] == 1"),
}


@pytest.mark.parametrize("case", PASS)
def test_right(case: str) -> None:
    assert verdict(*PASS[case]) == "passed"


WRONG = {
    "the argument is no copy": (RETURNS_ITS_ARGUMENT, "x = [1]\nassert f(x) is not x"),
    "unittest knows it too": (RETURNS_ITS_ARGUMENT, "import unittest\nx = [1]\nunittest.TestCase().assertIsNot(f(x), x)"),
    "a copy is not the argument": (COPIES, "x = [1]\nassert f(x) is x"),
    "a list for all": (SHARED, "assert f() is not f()"),
    "a default that is kept": ("def f(x, kept=[]):\n    kept.append(x)\n    return kept", "a = f(1)\nb = f(2)\nassert a is not b"),
    "the same dict": ("def f(d): return d", "d = {}\nassert not (f(d) is d)"),
    "an end before the tests": ("import sys\ndef f(): sys.exit(0)", "assert f() == 1"),
    "an end in failure": ("def f(): return 1", "import sys\nassert f() == 1\nsys.exit(3)"),
    "unittest.main": ("def f(): return 2", UNITTEST),
    "unittest.main skipped": ("import unittest\ndef f(): raise unittest.SkipTest", UNITTEST),
    "an end that the program raises": ("def f(): raise SystemExit(0)", "assert f() == 1"),
    "less than everything": (OWN_ORDER, "assert f() < 1"),
    "an int that is less than everything": (LYING_INT, "assert f() < 1"),
    "an input that answers itself": ("import builtins\nbuiltins.input = lambda *_: '4'\ndef f(): return 7", "assert f() == 8"),
    "an endless question": ("def f():\n    while True:\n        try: input()\n        except EOFError: pass", "assert f() == 1"),
    "a list of itself": ("def f():\n    x = []\n    x.append(x)\n    return x", "assert f() == []"),
    "an argument that holds itself": ("def f(x): x.append(x)", "x = []\nf(x)\nassert x == []"),
    "a constant": ("MOST = 4", "assert MOST == 5"),
    "print is no value": ("def f(): print(1)", "assert f() == 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str) -> None:
    said = verdict(*WRONG[case], test_s=0.5, wall_s=2.0)
    assert said != "passed" and not said.startswith("cause"), said


def test_what_nobody_can_tell_is_no_verdict() -> None:
    tests = "x = [[1]]\nassert f(x)[0] is not x[0]"
    for program in (COPIES, "def f(x): return [row[:] for row in x]"):
        assert "whether something inside of a value is the same object" in verdict(program, tests)


def test_answers_of_a_program_that_speaks_the_wire_itself_are_no_pass() -> None:
    """It can send what it likes: other contents for what it was given, labels that nobody made, questions without end."""
    for sent in (
        {"value": {"m": ["t1", [2]]}, "now": {}},
        {"value": None, "now": {"t1": {"d": [[1, 2]]}}},
        {"value": {"m": ["p1", 5]}},
        {"value": {"m": []}},
        {"value": True, "now": []},
        {"now": {}},
        {"input": "?"},
        {"printed": 5},
    ):
        program = f"import json, os\ndef f(x):\n    for _ in range(3): os.write(4, json.dumps({sent!r}).encode() + b'\\n')\n    os._exit(0)"
        said = verdict(program, "x, want = [1], [1, 2]\nassert f(x) == want\nassert want == [1, 2]", test_s=1.0)
        assert said != "passed" and not said.startswith("cause"), (sent, said)


def test_a_program_that_ends_raises_nothing_that_tests_could_expect() -> None:
    """A question that it has not read makes the end of the socket another error."""
    tests = "try:\n    str(f(0))\nexcept Exception: pass\nelse: assert False"
    assert verdict("def f(x): raise ValueError", tests) == "passed"
    ends = 'import os, time\ndef f(x):\n    os.write(4, b\'{"value": {"r": 0}}\\n\')\n    time.sleep(0.3)\n    os._exit(0)'
    assert verdict(ends, tests).startswith("test 1: failed: the program ended during its tests")


RAW = "import json, os\ndef f(*x):\n    os.write(4, json.dumps({}).encode() + b'\\n')\n    os._exit(0)"
FORGED = {
    "to be awaited": ({"value": {"r": 0}, "later": True, "awaitable": "x"}, "assert f(1) == 5"),
    "to be awaited, and plain": ({"value": 5, "later": True, "awaitable": "x"}, "import asyncio\nassert asyncio.run(f(1)) == 6"),
    "a function that the tests never gave": ({"value": {"r": {"function": 0}}}, "assert f(1) == 5"),
    "a function that they gave": ({"value": {"r": {"function": 0}}}, "assert f(lambda: 1)() == 5"),
    "a type that ends": ({"value": {"r": "builtins.SystemExit"}}, "assert f(1)(0) == 5"),
    "a function that ends": ({"value": {"r": "builtins.exit"}}, "assert f(1)(0) == 5"),
    "an end as an error": ({"error": ["builtins.SystemExit"], "with": [0]}, "assert f(1) == 5"),
    "an end of a loop": ({"error": ["builtins.StopIteration"], "with": []}, "for x in [1]:\n    assert f(1) == 5"),
    "a failed import": ({"error": ["builtins.ImportError"], "with": ["x"], "attributes": {"of_program": None}}, "assert f(1) == 5"),
    "no kind of error": ({"error": [], "with": []}, "assert f(1) == 5"),
    "a call of nothing": ({"back": -1, "args": [], "kwargs": {}, "now": {}}, "assert f(1) == 5"),
    "a call with no arguments": ({"back": 0, "args": 5, "kwargs": {}, "now": {}}, "assert f(lambda: 5) == 5"),
    "a call and a question": ({"input": None, "back": 0}, "assert f(lambda: 5) == 5"),
    "an object of no number": ({"value": {"r": None}}, "assert f(1) == 5"),
    "an object of a number without end": ({"value": {"r": 10**400}}, "assert f(1) == 5"),
    "objects in a set": ({"value": {"s": [{"r": 0}, {"r": 1}]}}, "assert f(1) == {5}"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_answers_of_every_kind_are_wrong(case: str) -> None:
    sent, tests = FORGED[case]
    said = verdict(RAW.replace("{}", repr(sent)), tests, test_s=1.0)
    assert said != "passed" and not said.startswith("cause"), said
