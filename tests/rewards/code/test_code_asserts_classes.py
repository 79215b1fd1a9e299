"""Asserts about classes of a program: operators, types, context managers, derived classes, iterators, what is awaited.

What tests may decide that way is decided as in one process; what a program cannot gain by it, and what nobody can tell, follows.
"""

from __future__ import annotations

import pytest
from rewards.code.test_code_asserts import verdict

MANAGERS = """
class Quiet:
    def __enter__(self): return self
    def __exit__(self, kind, error, tb):
        self.seen = kind.__name__ if kind else None
        return True
    def f(self, x): return 0
    def boom(self): raise KeyError('x')
class Timer:
    def __enter__(self): return self
    def __exit__(self, *a): self.done = True
class Tx:
    def __init__(self): self.log=[]
    def __enter__(self): return self
    def __exit__(self, kind, error, tb):
        self.log.append('rollback' if kind else 'commit')
        return False
class Only:
    def __init__(self, *kinds): self.kinds = kinds
    def __enter__(self): return self
    def __exit__(self, kind, error, tb): return kind is not None and issubclass(kind, self.kinds)
class Own(Exception): pass
"""
SHAPES = """
from abc import ABC, abstractmethod
class Shape(ABC):
    @abstractmethod
    def area(self): ...
    def describe(self): return f'{type(self).__name__} {self.area()}'
class Dog: pass
class Puppy(Dog): pass
class Err(ValueError): pass
"""
VALUES = """
class V:
    def __init__(self, x): self.x = x
    def __eq__(self, o): return isinstance(o, V) and self.x == o.x
    def __hash__(self): return hash(self.x)
    def __lt__(self, o): return self.x < o.x
    def plus(self, o): return V(self.x + o.x)
    def __add__(self, o): return V(self.x + o.x)
def mk(x): return V(x)
"""

PASS = {
    "exit suppresses raise": (MANAGERS, "with Quiet() as q: raise ValueError('x')\nassert q.seen == 'ValueError'"),
    "exit suppresses boom": (MANAGERS, "with Quiet() as q: q.boom()\nassert q.seen == 'KeyError'"),
    "tx": (
        MANAGERS,
        """
t = Tx()
try:
    with t: raise ValueError
except ValueError: pass
assert t.log == ['rollback']
with t: pass
assert t.log == ['rollback', 'commit']
""",
    ),
    "subclass": (
        SHAPES,
        """
class Sq(Shape):
    def __init__(self, s): self.s = s
    def area(self): return self.s ** 2
s = Sq(3)
assert s.area() == 9 and s.describe() == 'Sq 9' and isinstance(s, Shape) and isinstance(s, Sq)
""",
    ),
    "abstract": (SHAPES, "try: Shape()\nexcept TypeError: pass\nelse: assert False"),
    "issubclass": (SHAPES, "assert issubclass(Puppy, Dog) and not issubclass(Dog, Puppy)"),
    "issubclass exc": (SHAPES, "assert issubclass(Err, ValueError)\nassert issubclass(Err, Exception)"),
    "issubclass exc2": (SHAPES, "assert issubclass(Err, ValueError)\ntry: raise Err('x')\nexcept Err: pass"),
    "issubclass abc": (SHAPES, "from abc import ABC\nassert issubclass(Shape, ABC)"),
    "issubclass obj": (SHAPES, "assert issubclass(Dog, object)"),
    "class name": (SHAPES, "p = Puppy()\nassert p.__class__.__name__ == 'Puppy'"),
    "class is": (SHAPES, "p = Puppy()\nassert p.__class__ is Puppy and type(p) is Puppy and type(p) == Puppy and type(p) != Dog"),
    "type same": (SHAPES, "assert type(Dog()) == type(Dog()) and type(Dog()) != type(Puppy())"),
    "type fn": ("def f(x): return type(x)", "assert f(1) == int and f('a') is str"),
    "type bases": (SHAPES, "assert Puppy.__bases__ == (Dog,) and Puppy.__mro__[1] is Dog"),
    "two results": (VALUES, "assert mk(1) == mk(1) and mk(1) != mk(2)\nassert isinstance(mk(1), V)"),
    "two methods": (VALUES, "a, b = V(1), V(2)\nassert a.plus(b) == b.plus(a)"),
    "set of results": (VALUES, "assert len({mk(1), mk(1), mk(2)}) == 2"),
    "hasattr": (
        SHAPES + "class L:\n    def __len__(self): return 1\n    def __iter__(self): return iter([1])\n",
        "assert hasattr(L, '__iter__') and hasattr(L(), '__len__') and not hasattr(L(), '__contains__') and not hasattr(L(), 'zz')",
    ),
    "generator type": (
        "def f(n):\n    yield from range(n)",
        "import types\nassert isinstance(f(3), types.GeneratorType)\nassert list(f(3)) == [0,1,2]",
    ),
    "iterator abc": ("def f(n):\n    yield from range(n)", "from collections.abc import Iterator\nassert isinstance(f(3), Iterator)"),
    "enum": (
        "from enum import Enum\nclass C(Enum):\n    A=1\ndef f(): return C.A",
        "from enum import Enum\nassert issubclass(C, Enum) and isinstance(C.A, Enum) and f() is C.A",
    ),
    "inspect gen": ("def f(n):\n    yield from range(n)", "import inspect\nassert inspect.isgenerator(f(3))"),
    "inspect fn": ("def f(n):\n    yield from range(n)", "import inspect\nassert inspect.isgeneratorfunction(f)"),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 0\n",
        """
from dataclasses import is_dataclass, fields, asdict
assert is_dataclass(P)
assert [f.name for f in fields(P)] == ['x', 'y']
assert asdict(P(1)) == {'x': 1, 'y': 0}
""",
    ),
    "async": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        "import asyncio\nassert asyncio.run(f(1)) == 2",
    ),
    "exc arg": (
        MANAGERS + "def name(e): return type(e).__name__ + str(e)",
        "assert name(ValueError('x')) == 'ValueErrorx' and name(Own('y')) == 'Owny'",
    ),
    "lt made ok": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __lt__(s, o): return s.x < o.x",
        """
assert V(1) < V(2) and not V(2) < V(1)
assert [v.x for v in sorted([V(3), V(1)])] == [1, 3] and max(V(1), V(5)).x == 5
""",
    ),
    "total ordering": (
        """
from functools import total_ordering
@total_ordering
class V:
    def __init__(s, x): s.x = x
    def __lt__(s, o): return s.x < o.x
    def __eq__(s, o): return s.x == o.x
""",
        "assert V(1) < V(2) and V(2) >= V(1) and V(1) <= V(1)",
    ),
    "add made": (
        """
class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __mul__(s, k): return V(s.x * k)
    __rmul__ = __mul__
    def __neg__(s): return V(-s.x)
    def __abs__(s): return abs(s.x)
    def __iadd__(s, o): s.x += o.x; return s
""",
        """
v = V(1) + V(2)
assert v.x == 3 and (V(2) * 3).x == 6 and (3 * V(2)).x == 6 and (-V(1)).x == -1 and abs(V(-4)) == 4
w = V(1)
w += V(5)
assert w.x == 6
""",
    ),
    "infinite gen": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        """
import itertools
assert list(itertools.islice(f(), 5)) == [0,1,2,3,4]
g = f()
assert next(g) == 0
for x in g:
    if x > 100: break
assert x == 101
""",
    ),
    "infinite class": (
        """
class F:
    def __iter__(self):
        a, b = 0, 1
        while True:
            yield a
            a, b = b, a + b
""",
        "out = []\nfor x in F():\n    if x > 10: break\n    out.append(x)\nassert out == [0,1,1,2,3,5,8]",
    ),
    "long gen": ("def f(n):\n    yield from range(n)", "assert sum(f(100000)) == sum(range(100000))"),
    "gen send": (
        "def f():\n    x = 0\n    while True:\n        y = yield x\n        x += y or 0",
        "g = f()\nnext(g)\nassert g.send(5) == 5 and g.send(2) == 7\ng.close()",
    ),
    "gather": (
        """
import asyncio
log = []
async def f(n, d):
    log.append(n)
    await asyncio.sleep(d)
    log.append(-n)
    return n
""",
        """
import asyncio
async def main():
    return await asyncio.gather(f(1, 0.05), f(2, 0.01))
assert asyncio.run(main()) == [1, 2]
assert log == [1, 2, -2, -1]
""",
    ),
    "wait_for": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(5)",
        """
import asyncio
async def main():
    try: await asyncio.wait_for(f(), 0.05)
    except asyncio.TimeoutError: return 'late'
assert asyncio.run(main()) == 'late'
""",
    ),
    "async cm": (
        """
class C:
    async def __aenter__(self): self.open = True; return self
    async def __aexit__(self, *a): self.open = False
    async def get(self): return 4
""",
        """
import asyncio
async def main():
    async with C() as c:
        assert c.open and await c.get() == 4
    assert not c.open
asyncio.run(main())
""",
    ),
    "async gen": (
        "async def f(n):\n    for i in range(n): yield i",
        "import asyncio\nasync def main(): return [x async for x in f(3)]\nassert asyncio.run(main()) == [0, 1, 2]",
    ),
    "async iter class": (
        """
class C:
    def __init__(self): self.n = 0
    def __aiter__(self): return self
    async def __anext__(self):
        self.n += 1
        if self.n > 3: raise StopAsyncIteration
        return self.n
""",
        "import asyncio\nasync def main(): return [x async for x in C()]\nassert asyncio.run(main()) == [1, 2, 3]",
    ),
    "async raises": (
        "async def f(): raise ValueError('x')",
        "import asyncio\ntry: asyncio.run(f())\nexcept ValueError as e: assert str(e) == 'x'\nelse: assert False",
    ),
    "async lock": (
        """
import asyncio
class Q:
    def __init__(self): self.e = asyncio.Event()
    async def wait(self):
        await self.e.wait()
        return 'go'
    async def set(self): self.e.set()
""",
        """
import asyncio
async def main():
    q = Q()
    return await asyncio.gather(q.wait(), q.set())
assert asyncio.run(main()) == ['go', None]
""",
    ),
    "isolated asyncio": (
        "import unittest\nasync def f(x): return x * 2",
        """
import unittest
class T(unittest.IsolatedAsyncioTestCase):
    async def test_a(self):
        self.assertEqual(await f(2), 4)
unittest.main()
""",
    ),
    "derive imports": (
        """
from abc import ABC, abstractmethod
class B(ABC):
    @abstractmethod
    def step(self): ...
    def run(self): return self.step() * 2
""",
        """
import math
from typing import List
class C(B):
    def step(self) -> List[int]:
        return math.floor(2.5)
assert C().run() == 4
""",
    ),
    "derive twice": (
        "class B:\n    def who(self): return type(self).__name__",
        """
class C(B): pass
class D(C): pass
assert D().who() == 'D' and isinstance(D(), C) and isinstance(D(), B) and issubclass(D, C) and not isinstance(B(), C)
""",
    ),
    "derive in check": (
        "class B:\n    def who(self): return type(self).__name__",
        """
def check(candidate):
    class C(candidate):
        def x(self): return 1
    assert C().who() == 'C' and C().x() == 1
check(B)
""",
    ),
    "derive exc": (
        "class E(Exception): pass\ndef f(): raise E('x')",
        "class E2(E): pass\ntry: f()\nexcept E as e: assert str(e) == 'x'\nelse: assert False\nassert issubclass(E2, E)",
    ),
    "derive init_subclass": (
        "class B:\n    kinds = []\n    def __init_subclass__(cls, **k): B.kinds.append(cls.__name__)",
        "class C(B): pass\nassert B.kinds == ['C']",
    ),
    "signature": (
        "def f(a, b=2, *c): pass",
        """
import inspect
assert list(inspect.signature(f).parameters) == ['a', 'b', 'c']
assert str(inspect.signature(f)) == '(a, b=2, *c)'
""",
    ),
    "str method arg": (
        "def ap(g, x): return g(x)",
        "import math, operator\nassert ap(str.upper, 'a') == 'A' and ap(math.sqrt, 4) == 2 and ap(len, [1]) == 1",
    ),
    "reduce arg": (
        "from functools import reduce\ndef red(g, xs): return reduce(g, xs)",
        "import operator\nassert red(operator.add, [1, 2, 3]) == 6",
    ),
    "kinds arg": ("def conv(x, kind): return kind(x)", "assert conv('5', int) == 5 and conv(5, str) == '5' and conv('1', float) == 1.0"),
    "exception arg kinds": (
        "def retry(g, n, kinds):\n    return kinds",
        "assert retry(len, 2, (ValueError, KeyError)) == (ValueError, KeyError)",
    ),
    "deepcopy": (
        "class V:\n    def __init__(self, *a): self.a = a\n",
        "import copy\nv = V([1])\nw = copy.deepcopy(v)\nassert w is not v and w.a == ([1],)",
    ),
    "match": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n",
        "p = P(3)\nassert p.x == 3 and str(p) == 'P(x=3)' and repr(p) == 'P(x=3)'",
    ),
    "eq dataclass result": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef mk(x): return P(x)\n",
        "assert mk(3) == mk(3) and mk(3) != mk(4) and mk(3) in [mk(3)] and [mk(1)] == [mk(1)]",
    ),
    "tree eq": (
        """
class N:
    def __init__(s, v, l=None): s.v, s.l = v, l
    def __eq__(s, o): return o is not None and s.v == o.v and s.l == o.l
def build(xs):
    n = None
    for x in xs: n = N(x, n)
    return n
""",
        "assert build([1,2]) == build([1,2]) and build([1]) != build([2])",
    ),
    "slots": (
        """
class P:
    __slots__ = ('x', '__y')
    def __init__(s, x): s.x = x; s.__y = 2
    def __eq__(s, o): return s.x == o.x
    def __hash__(s): return hash(s.x)
def mk(x): return P(x)
""",
        "assert mk(1) == mk(1) and mk(1) != mk(2) and len({mk(1), mk(1)}) == 1",
    ),
    "isinstance union": ("def f(x): return x", "assert isinstance(f(1), int | str) and isinstance(f('a'), (int, str))"),
    "Optional none": ("def f(x): return None", "assert f(1) is None and type(f(1)) is type(None) and isinstance(f(1), type(None))"),
    "unhashable": (
        """
class P:
    def __init__(s, x): s.x = x
    def __eq__(s, o): return s.x == o.x
def nodes(): return [P(1), P(2)]
""",
        "a, b = nodes()\nassert a != b and a == a",
    ),
    "visited set made": (
        """
class P:
    def __init__(s, x): s.x = x
    def __eq__(s, o): return s.x == o.x
    def __hash__(s): return hash(s.x)
""",
        "a, b = P(1), P(2)\nd = {a: 1, b: 2}\nassert d[a] == 1 and d[b] == 2",
    ),
    "class attribute types": (
        """
class P:
    registry = {}
    @classmethod
    def make(cls): return cls()
    @staticmethod
    def two(): return 2
    @property
    def z(self): return 3
""",
        "assert P.two() == 2 and P.make().z == 3 and isinstance(P.make(), P) and type(P.make()) is P and P.registry == {}",
    ),
    "super": (
        "class B:\n    def __init__(self, n): self.n = n\n    def show(self): return f'B{self.n}'",
        """
class C(B):
    def __init__(self, n):
        super().__init__(n)
        self.m = 1
    def show(self): return super().show() + '!'
c = C(3)
assert c.show() == 'B3!' and c.m == 1
""",
    ),
    "stop try": (
        "def f(n):\n    yield from range(n)\n",
        "g = f(1)\nassert next(g) == 0\ntry:\n    next(g)\n    assert False\nexcept StopIteration: pass",
    ),
    "stop unittest with": (
        "def f(n):\n    yield from range(n)\n",
        """
import unittest
t = unittest.TestCase()
g = f(1)
assert next(g) == 0
with t.assertRaises(StopIteration): next(g)
""",
    ),
    "stop unittest call": (
        "def f(n):\n    yield from range(n)\n",
        "import unittest\nt = unittest.TestCase()\ng = f(1)\nassert next(g) == 0\nt.assertRaises(StopIteration, next, g)",
    ),
    "stop class": (
        """
class C:
    def __init__(s): s.n = 0
    def __iter__(s): return s
    def __next__(s):
        s.n += 1
        if s.n > 2: raise StopIteration
        return s.n
""",
        "c = C()\nassert list(c) == [1, 2]\ntry:\n    next(c)\nexcept StopIteration: done = True\nassert done",
    ),
    "type map": ("class A: pass\ndef f(): return [A(), 1]", "assert list(map(type, f())) == [A, int]"),
    "coroutine arg": (
        "import asyncio\nasync def f(x): return x\nasync def all_of(cs): return await asyncio.gather(*cs)",
        "import asyncio\nassert asyncio.run(all_of([f(1), f(2)])) == [1, 2]",
    ),
    "print order": (
        "def f(n):\n    for i in range(n):\n        print(i)\n        yield i",
        """
import io, contextlib
b = io.StringIO()
with contextlib.redirect_stdout(b):
    for x in f(2): print('t', x)
assert b.getvalue() == '0\\nt 0\\n1\\nt 1\\n'
""",
    ),
}


@pytest.mark.parametrize("case", PASS)
def test_right(case: str) -> None:
    assert verdict(*PASS[case]) == "passed"


WRONG = {
    "exit swallows assert": (MANAGERS, "with Quiet() as q: assert q.f(1) == 5"),
    "exit swallows assert then": (MANAGERS, "with Quiet() as q:\n    q.boom()\n    assert q.f(1) == 5"),
    "exit swallows index": (MANAGERS, "with Quiet() as q: assert [][q.f(1)] == 5"),
    "subclass wrong": (
        SHAPES.replace("area()}", "area}"),
        """
class Sq(Shape):
    def __init__(self, s): self.s = s
    def area(self): return self.s ** 2
s = Sq(3)
assert s.describe() == 'Sq 9'
""",
    ),
    "class is wrong": (SHAPES, "p = Puppy()\nassert p.__class__ is Dog"),
    "type eq wrong": (SHAPES, "p = Puppy()\nassert type(p) == Dog"),
    "type int": ("def f(x): return [x]", "assert type(f(1)) == int"),
    "two results wrong": (VALUES, "assert mk(1) == mk(2)\nassert isinstance(mk(1), V)"),
    "two garbage": (
        """
class V:
    def __eq__(self, o): return True
    def f(self): global n; n = globals().get('n', 0) + 1; w = V(); w.n = n; return w
""",
        "a = V()\nassert a.f() == a.f()",
    ),
    "lt two": ("class W:\n    def __lt__(self, o): return True\nclass V:\n    def f(self): return W()", "a = V()\nassert a.f() < a.f()"),
    "async wrong": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x",
        "import asyncio\nassert asyncio.run(f(1)) == 2",
    ),
    "exit() as value": ("def f(x): return exit", "h = f(2)\nassert h(0) == 5"),
    "SystemExit class": ("def f(x): return SystemExit", "h = f(2)\nassert h(0) == 5"),
    "type class": ("def f(x): return type", "h = f(2)\nassert h(0) == 5"),
    "swallow for loop": (
        "class C:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n    def g(s): raise ValueError",
        "with C() as c:\n    for i in range(3):\n        c.g()\n        assert False",
    ),
    "swallow expr assertEqual": (
        "class C:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n    def g(s): return 1",
        "import unittest\nt = unittest.TestCase()\nwith C() as c: t.assertEqual(c.g(), 5)",
    ),
    "enter returns other": (
        "class C:\n    def __enter__(s): return 5\n    def __exit__(s, *a): return True",
        "with C() as c:\n    assert c == 6",
    ),
    "float leak sub": (
        """
class E:
    def __sub__(s, o): return 0.0
    def __abs__(s): return 0.0
    def __rsub__(s, o): return 0.0
def f(x): return E()
""",
        "assert abs(f(2) - 5) < 1e-6",
    ),
    "float leak rsub": ("class E:\n    def __rsub__(s, o): return 0.0\ndef f(x): return E()", "assert abs(5 - f(2)) < 1e-6"),
    "leak named class": (
        "class V:\n    def __sub__(s, o): return 0.0\n    def dot(s, o): return V()",
        "assert abs(V().dot(V()) - 11) < 1e-6",
    ),
    "round leak": ("class E:\n    def __round__(s, n): return 5\ndef f(x): return E()", "assert round(f(2), 2) == 5"),
    "int of obj": ("class E:\n    def __int__(s): return 5\ndef f(x): return E()", "assert int(f(2)) == 5"),
    "mod leak": ("class E:\n    def __mod__(s, o): return 0\ndef f(x): return E()", "assert f(2) % 5 == 0"),
    "lt made": (
        "class V:\n    def __init__(s, x): pass\n    def __lt__(s, o): return True\n    def __gt__(s, o): return True",
        "assert V(1) < V(2)",
    ),
    "bool attr": ("class V:\n    def __bool__(s): return True\ndef f(x): return V()", "assert f(1) is True"),
    "in": (
        "class V:\n    def __contains__(s, x): return True\n    def __iter__(s): return iter([1])\ndef f(x): return V()",
        "assert 5 in f(1)",
    ),
    "async plain cheat": (
        "class E:\n    def __eq__(s, o): return True\nasync def f(x): return E()",
        "import asyncio\nassert asyncio.run(f(1)) == 2",
    ),
    "isolated asyncio wrong": (
        "import unittest\nasync def f(x): return x * 3",
        """
import unittest
class T(unittest.IsolatedAsyncioTestCase):
    async def test_a(self):
        self.assertEqual(await f(2), 4)
unittest.main()
assert True
""",
    ),
    "always eq objs": (
        """
class N:
    n = 0
    def __init__(s): N.n += 1; s.n = N.n
    def __eq__(s, o): return True
def f(x): return N()
""",
        "assert f(1) == f(2)",
    ),
    "isinstance tests' own": ("def f(x): return object()", "class A: pass\nassert isinstance(f(1), A)"),
    "lying isinstance int": (
        "class E:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(x): return E()",
        "assert isinstance(f(1), int) and f(1) == 5",
    ),
    "lying type": ("class E:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(x): return E()", "assert type(f(1)) is int"),
    "cannot by exc in with": (
        "class C:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n    def g(s): return object()",
        "with C() as c:\n    assert c.g() == 4",
    ),
    "test exc in with": (
        "class C:\n    def __enter__(s): return s\n    def __exit__(s, *a): return False\n    def g(s): return 3",
        """
class Bad(Exception):
    def __init__(self, o): super().__init__(self)
with C() as c:
    if c.g() != 4: raise Bad(1)
assert True
""",
    ),
    "policy coroutine for plain": (
        "async def g(x): return 5\ndef f(x): return g(x)",
        "import asyncio\nasync def other(): return 1\nassert asyncio.run(other()) == 1\nassert f(1) == 5",
    ),
    "forge start": ("import os, json\nasync def f(x): return 5", "import asyncio\nassert asyncio.run(f(1)) == 6"),
    "never done": (
        "import asyncio\nasync def f(x):\n    while True: await asyncio.sleep(0)",
        "import asyncio\nassert asyncio.run(f(1)) == 6",
    ),
    "ABC register iterable": (
        "class E:\n    def __iter__(s): return iter(())\ndef f(x): return E()",
        "r = f(1)\nfrom collections.abc import Iterable\nassert isinstance(r, Iterable)\nassert list(r) == [1]",
    ),
    "module func forged": (
        "import inspect\ninspect.signature = lambda f: 5\ndef f(a): pass",
        "import inspect\nassert str(inspect.signature(f)) == '(a, b)'",
    ),
    "stop try wrong": (
        "def f(n):\n    yield from range(n + 1)\n",
        "g = f(1)\nassert next(g) == 0\ntry:\n    next(g)\n    assert False\nexcept StopIteration: pass",
    ),
    "stop early": (
        "def f(n):\n    yield from ()",
        "g = f(1)\nassert next(g) == 0\ntry:\n    next(g)\n    assert False\nexcept StopIteration: pass",
    ),
    "stop never": (
        "def f(n):\n    while True: yield 0",
        "g = f(1)\nassert next(g) == 0\ntry:\n    next(g)\n    assert False\nexcept StopIteration: pass",
    ),
    "stop in map": (
        "def f(n):\n    yield from ()",
        "r = f(3)\ntry:\n    assert all(map(lambda x: next(r) == x, [1, 2, 3]))\nexcept StopIteration: assert False",
    ),
    "stop in genexpr": (
        "def f(n):\n    yield from ()",
        "r = f(3)\ntry:\n    assert all(next(r) == x for x in [1, 2, 3])\nexcept StopIteration: assert False",
    ),
    "stop in for outside": (
        "def f(n):\n    yield from ()",
        "r = f(3)\nfor x in [1, 2]:\n    assert next(r) == x\ntry: next(iter([]))\nexcept StopIteration: pass",
    ),
    "type map wrong": ("class A: pass\ndef f(): return [A(), A()]", "assert list(map(type, f())) == [A, int]"),
    "truthy lt": (
        """
class T:
    pass
class V:
    def __init__(s, x): pass
    def __lt__(s, o): return T()
    def __gt__(s, o): return T()
""",
        "assert V(1) < V(2)",
    ),
    "always le": (
        """
class V:
    def __init__(s, x): pass
    def __le__(s, o): return True
    def __gt__(s, o): return True
    __ge__ = __le__
    __lt__ = __gt__
""",
        "assert V(1) <= V(2)",
    ),
    "coroutine arg cheat": (
        "async def g(x): return 5\ndef h(x): return 5",
        "import asyncio\nasync def main():\n    return 1\nassert asyncio.run(main()) == 1 and h(g(1)) == 6",
    ),
    "endless arg cheat": ("def g(x):\n    while True: yield 1\ndef h(x): return 5", "assert h(iter(g(1))) == 6"),
    "endless arg cheat2": ("def g(x):\n    while True: yield 1\ndef h(x): return 5", "assert h(x for x in g(1)) == 6"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str) -> None:
    said = verdict(*WRONG[case], test_s=1.0, wall_s=3.0)
    assert said != "passed" and not said.startswith("cause"), said


UNDECIDED = {
    "two made": (VALUES, "assert V(1) == V(1)"),
    "set of made": (VALUES, "assert len({V(1), V(1)}) == 1"),
    "derive with assert": (
        "class B:\n    def run(self): return self.step(1)",
        "class C(B):\n    def step(self, x):\n        assert x == 1\n        return 5\nassert C().run() == 5",
    ),
    "derive with closure": (
        "class B:\n    def run(self): return self.step(1)",
        "seen = []\nclass C(B):\n    def step(self, x):\n        seen.append(x)\n        return 5\nassert C().run() == 5",
    ),
    "derive testcase": (
        "class M: pass\ndef f(): return 0",
        """
import unittest
class T(M, unittest.TestCase):
    def test(self): self.assertEqual(f(), 5)
M()
unittest.main()
""",
    ),
}


@pytest.mark.parametrize("case", UNDECIDED)
def test_what_nobody_can_tell_is_no_verdict(case: str) -> None:
    assert "the harness cannot do this" in verdict(*UNDECIDED[case])
