"""Asserts that give functions of the tests to the program: it calls them, they run with the tests."""

from __future__ import annotations

import pytest
from rewards.code.test_code_asserts import verdict

HIGHER = """
import functools, time
def timed(f):
    @functools.wraps(f)
    def inner(*a, **k):
        inner.calls += 1
        return f(*a, **k)
    inner.calls = 0
    return inner
def memo(f):
    seen = {}
    def inner(*a):
        if a not in seen: seen[a] = f(*a)
        return seen[a]
    return inner
def retry(n):
    def deco(f):
        def inner(*a, **k):
            for i in range(n):
                try: return f(*a, **k)
                except ValueError as e: last = e
            raise last
        return inner
    return deco
def apply(f, xs): return [f(x) for x in xs]
def compose(*fs):
    def inner(x):
        for f in reversed(fs): x = f(x)
        return x
    return inner
def swallow(f):
    try: return f(0)
    except BaseException: return 5
def identity(f): return f
class Bus:
    def __init__(self): self.handlers = []
    def on(self, f): self.handlers.append(f)
    def emit(self, *a):
        for h in self.handlers: h(*a)
"""

PASS = {
    "map": (HIGHER, "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]"),
    "compose": (HIGHER, "assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11"),
    "memo": (
        HIGHER,
        """
calls = []
@memo
def fib(n):
    calls.append(n)
    return n if n < 2 else fib(n - 1) + fib(n - 2)
assert fib(15) == 610 and len(calls) == 16
""",
    ),
    "wraps": (
        HIGHER,
        """
@timed
def g(x):
    'doc'
    return x
assert g(3) == 3 and g(x=4) == 4 and g.calls == 2 and g.__name__ == 'g' and g.__doc__ == 'doc'
""",
    ),
    "retry": (
        HIGHER,
        """
n = 0
@retry(3)
def g():
    global n
    n += 1
    if n < 3: raise ValueError('no')
    return n
assert g() == 3
""",
    ),
    "retry raises": (
        HIGHER,
        """
@retry(2)
def g(): raise ValueError('no')
try: g()
except ValueError as e: assert str(e) == 'no'
else: assert False
""",
    ),
    "callback list": (
        HIGHER,
        """
got = []
b = Bus()
b.on(got.append)
b.on(lambda x: got.append(x * 2))
b.emit(3)
assert got == [3, 6]
""",
    ),
    "mock": (
        HIGHER,
        """
from unittest.mock import Mock
m = Mock(return_value=7)
assert apply(m, [1]) == [7]
m.assert_called_once_with(1)
""",
    ),
    "identity": (HIGHER, "def g(): return 1\nassert identity(g) is g and identity(g)() == 1"),
    "error inside swallowed": (HIGHER, "def g(x): raise KeyError(x)\nassert swallow(g) == 5"),
    "sorted key": (
        "def s(xs, key): return sorted(xs, key=key)",
        "assert s(['bb', 'a'], key=lambda x: len(x)) == ['a', 'bb'] and s([1, 2], lambda x: -x) == [2, 1]",
    ),
    "object argument back": (
        "class P:\n    def __init__(s, x): s.x = x\ndef each(ps, f): return [f(p) for p in ps]",
        """
ps = [P(1), P(2)]
assert each(ps, lambda p: p.x * 10) == [10, 20]
assert each(ps, lambda p: p)[0] is ps[0]
""",
    ),
    "nested lists": ("def fill(f):\n    x = []\n    f(x)\n    return x", "def g(x): x.append(4)\nassert fill(g) == [4]"),
    "generator to function": ("def f(g): return sum(g(3))", "def g(n):\n    for i in range(n): yield i\nassert f(g) == 3"),
    "in threads": (
        """
from concurrent.futures import ThreadPoolExecutor
def pmap(f, xs):
    with ThreadPoolExecutor(4) as p: return list(p.map(f, xs))
""",
        "assert pmap(lambda x: x * x, range(20)) == [x * x for x in range(20)]",
    ),
    "print order": (
        "def f(g):\n    print('a')\n    g()\n    print('c')",
        """
import io, contextlib
b = io.StringIO()
with contextlib.redirect_stdout(b): f(lambda: print('b'))
assert b.getvalue() == 'a\\nb\\nc\\n'
""",
    ),
    "closure counter": (
        """
def throttle(f, n):
    c = 0
    def inner(*a):
        nonlocal c
        c += 1
        return f(*a) if c <= n else None
    return inner
""",
        "t = throttle(lambda x: x, 2)\nassert [t(1), t(2), t(3)] == [1, 2, None]",
    ),
}


@pytest.mark.parametrize("case", PASS)
def test_right(case: str) -> None:
    assert verdict(*PASS[case]) == "passed"


WRONG = {
    "map wrong": (HIGHER, "assert apply(lambda x: x + 1, [1, 2]) == [2, 4]"),
    "mock wrong": (
        HIGHER.replace("f(x) for x in xs", "f(0) for x in xs"),
        """
from unittest.mock import Mock
m = Mock(return_value=7)
assert apply(m, [1]) == [7]
m.assert_called_once_with(1)
""",
    ),
    "assert inside": (HIGHER, "def g(x):\n    assert x == 1\n    return 5\nassert swallow(g) == 5"),
    "endless calls": ("def f(g):\n    while True: g(1)", "assert f(lambda x: x) == 1"),
    "endless recursion": ("def f(g): return g(g)", "def g(h): return f(h)\nassert f(g) == 1"),
    "forged back": (
        """
import os
def f(x):
    os.write(4, b'{"back": 0, "args": [], "kwargs": {}, "now": {}}\\n')
    return 1
""",
        "assert f(1) == 5",
    ),
    "forged back 2": ('import os\ndef f(x):\n    os.write(4, b\'{"back": -1, "args": 5}\\n\')\n    return 1', "assert f(lambda: 5) == 5"),
    "call with what cannot cross": ("def f(g): return g(object)", "assert f(lambda x: 6) == 5"),
    "late call": (
        """
import threading, time
def f(g):
    threading.Thread(target=lambda: (time.sleep(0.1), g(1))).start()
    return 1
def h():
    time.sleep(0.3)
    return 3
""",
        "got = []\nassert f(got.append) == 1\nassert h() == 4",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str) -> None:
    said = verdict(*WRONG[case], test_s=1.0, wall_s=3.0)
    assert said != "passed" and not said.startswith("cause"), said


UNDECIDED = {
    "async function": ("async def f(g): return await g()", "import asyncio\nasync def g(): return 1\nassert asyncio.run(f(g)) == 1"),
    "class argument": ("def f(k): return k().x", "class A:\n    x = 1\nassert f(A) == 1"),
}


@pytest.mark.parametrize("case", UNDECIDED)
def test_what_nobody_can_tell_is_no_verdict(case: str) -> None:
    assert "the harness cannot do this" in verdict(*UNDECIDED[case])
