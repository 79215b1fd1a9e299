"""Operators of the program's classes in tests inside its process: they decide no comparison with a plain value, and work otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.code.reward import CodeReward

PACKAGES = str(Path(numpy.__file__).parents[1])


def verdict(program: str, tests: str, **settings: object) -> str:
    [score] = CodeReward(**settings)([RewardInput("code", "", program, tests, {}, "stop")])
    assert isinstance(score, Score) and score.details.get("inside"), score
    return str(score.details["verdict"])


LIAR = """
class {name}:
    def __init__(self, *r, **named): self.r = r
    def __sub__(self, other): return 0.0
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __hash__(self): return hash(28.274)
    def __pow__(self, *others): return 0.0
    def __divmod__(self, other): return 0, 0.0
    def __abs__(self): return self
    __rsub__ = __isub__ = __add__ = __radd__ = __mod__ = __truediv__ = __sub__
    __le__ = __gt__ = __ge__ = __lt__
"""
AREA = LIAR.format(name="Area")
LIES = [
    "x = Area(3)\nx -= 28.274\nassert abs(x) < 1e-3",
    "d = 28.274\nd -= Area(3)\nassert abs(d) < 1e-3",
    "assert divmod(Area(3), 28.274) == (0, 0.0)",
    "assert pow(Area(3), 2) == 0.0",
    "import operator\nassert operator.sub(Area(3), 28.274) == 0.0",
    "import operator\nassert operator.eq(Area(3), 28.274)",
    "import operator as o, functools\nassert functools.partial(o.isub, Area(3))(28.274) == 0.0",
    "assert Area(3).__eq__(28.274)",
    "assert Area.__eq__(Area(3), 28.274)",
    "assert not Area(3).__sub__(28.274)",
    "import unittest\nunittest.TestCase().assertTrue(Area(3).__eq__(28.274))",
    "assert [28.274].count(Area(3)) == 1",
    "assert [28.274].index(Area(3)) == 0",
    "x = [28.274]\nx.remove(Area(3))\nassert x == []",
    "assert {28.274: 1}[Area(3)] == 1",
    "assert {28.274: 1}.get(Area(3)) == 1",
    "assert {Area(3)} - {28.274} == set()",
    "assert {Area(3)}.issubset({28.274})",
    "assert len({Area(3), 28.274}) == 1",
    "from collections import Counter\nassert Counter([Area(3)]) == Counter([28.274])",
    "from collections import deque\nassert deque([Area(3)]) == deque([28.274])",
    "from collections import UserList\nassert UserList([Area(3)]) == UserList([28.274])",
    "match Area(3):\n    case 28.274: pass\n    case _: assert False",
    "assert any(map((28.274).__eq__, [Area(3)])) or any(map(Area(3).__eq__, [28.274]))",
    "assert max(Area(3), 5) == 5 and sorted([6, Area(3)])[1] == 6",
    "import statistics\nassert statistics.mean([Area(3), 28.274]) == 0",
    "import weakref\na = Area(3)\nassert weakref.proxy(a).__eq__(28.274) is True",
    "class B(Area): pass\nassert [28.274].count(B(3)) == 1",
]


HIDDEN = {
    "its module": f"{LIAR.format(name='E')}    __module__ = 'builtins'",
    "its operators, by its metaclass": "class M(type):\n    __mro__ = __dict__ = __flags__ = property(lambda c: ())\n"
    "    __subclasses__ = lambda c: []\n    __setattr__ = lambda c, n, v: None\n"
    f"    __getattribute__ = lambda c, n: ()\n    __hash__ = lambda c: 1 / 0\n{LIAR.format(name='E(metaclass=M)')}",
    "its class": f"{LIAR.format(name='E')}    __class__ = property(lambda s: float)",
    "what it is asked for": f"{LIAR.format(name='E')}    __getattribute__ = lambda s, n: 0.0",
    "a class made during the test": f"def E():\n    {LIAR.format(name='E').strip().replace(chr(10), chr(10) + '    ')}\n    return E()",
    "a class made without a statement": "def E():\n    lies = lambda *others: True\n"
    "    return type('E', (), {'__eq__': lies, '__sub__': lambda *o: 0.0, '__hash__': lambda s: hash(28.274)})()",
    "operators added later": "class K: pass\ndef E():\n    K.__eq__ = lambda *others: True\n    K.__sub__ = lambda *o: 0.0\n"
    "    K.__hash__ = lambda s: hash(28.274)\n    return K()",
    "a builtin for an operator": "class E:\n    __module__ = 'builtins'\n    __eq__ = bool\n    __sub__ = int\n    __hash__ = None",
    "a partial function for an operator": "import functools\nclass E:\n    __eq__ = functools.partialmethod(lambda *o: True)\n"
    "    __sub__ = functools.partialmethod(lambda *o: 0.0)\n    __hash__ = None",
    "a static function for an operator": "class E:\n    __eq__ = staticmethod(lambda o: True)\n    __sub__ = staticmethod(lambda o: 0.0)",
    "a base of its class": f"{LIAR.format(name='D')}class E(D): pass",
    "the class of its class": f"class M(type):\n    {LIAR.format(name='M').partition(chr(10))[2].partition(chr(10))[2].strip()}\n"
    "class K(metaclass=M): pass\ndef E(): return K",
    "a module that it writes": f"open('helper.py', 'w').write({LIAR.format(name='E')!r})\n"
    "import sys\nsys.path.insert(0, '.')\nfrom helper import E",
    "a module that it names like one of Python's": f"open('fractions.py', 'w').write({LIAR.format(name='E')!r})\n"
    "import sys\nsys.path.insert(0, '.')\nsys.modules.pop('fractions', None)\nimport importlib\nE = importlib.import_module('fractions').E",
    "a module that it makes": "import sys, types\nhelper = sys.modules['helper'] = types.ModuleType('helper')\n"
    f"exec({LIAR.format(name='E')!r}, vars(helper))\nfrom helper import E",
    "global names of one of Python's modules": "import types, operator\nown = lambda f: types.FunctionType(f.__code__, vars(operator))\n"
    "E = type('E', (), {'__eq__': own(lambda *o: True), '__sub__': own(lambda *o: 0.0), '__hash__': own(lambda s: -1)})\n"
    "E.__module__ = 'operator'",
    "a plain class": f"{LIAR.format(name='E(float)')}",
}


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize(
    "tests", ["assert [28.274].count(E()) == 1", "x = E()\nx -= 28.274\nassert x == 0", "e = P().x\nassert [28.274].count(e)"]
)
def test_a_liar_cannot_hide(how: str, tests: str) -> None:
    program = f"{HIDDEN[how]}\nclass P:\n    x = property(lambda s: E())\n"
    said = verdict(program, f"{tests}\nP()")
    assert said.startswith("test 1: failed: "), said


ARRAYS = """
class E:
    def __array_function__(self, *others): return True
    def __array_ufunc__(self, *others, **named): return True
"""
OF_ARRAYS = {
    "a function": (f"{ARRAYS}def area(r): return E()", "assert np.allclose(area(3), 28.274)"),
    "a function of two arrays": (f"{ARRAYS}def area(r): return E()", "assert np.array_equal(area(3), [28.274])"),
    "an operator": (f"{ARRAYS}def area(r): return E()", "assert np.all(np.array([28.274]) == area(3))"),
    "a kind of array": (
        f"import numpy as np\n{ARRAYS.replace('E:', 'E(np.ndarray):')}def area(r): return np.zeros(1).view(E)",
        "assert np.allclose(area(3), [28.274])",
    ),
    "its operator": (
        f"import numpy as np\n{ARRAYS.replace('E:', 'E(np.ndarray):')}def area(r): return np.zeros(1).view(E)",
        "assert area(3) == np.array([28.274])",
    ),
    "a result": (
        "import numpy as np\nclass E(np.ndarray):\n    def __array_wrap__(self, *others): return True\n"
        "def area(r): return np.zeros(1).view(E)",
        "assert area(3) == np.array([28.274])",
    ),
}


@pytest.mark.parametrize("how", OF_ARRAYS)
def test_numpy_asks_no_class_of_a_program_about_plain_values(how: str) -> None:
    program, tests = OF_ARRAYS[how]
    said = verdict(program, f"import numpy as np\nE\n{tests}", python_path=[PACKAGES], memory_mb=4096)
    assert said.startswith("test 1: failed: AssertionError"), said


def test_arrays_of_a_programs_class_work() -> None:
    program = """
import numpy as np
class Vector(np.ndarray):
    def __array_finalize__(self, other): self.unit = getattr(other, 'unit', 'm')
def vector(*x): return np.array(x).view(Vector)
class Length:
    def __init__(self, x): self.x = x
    def __array_ufunc__(self, ufunc, method, *values, **named):
        return Length(getattr(ufunc, method)(*(getattr(one, 'x', one) for one in values), **named))
    def __array_function__(self, function, kinds, values, named):
        return function(*(getattr(one, 'x', one) for one in values), **named)
"""
    tests = "import numpy as np\nassert (vector(1, 2) + 1 == np.array([2, 3])).all() and vector(1, 2).unit == 'm'\n"
    tests += "assert (abs(vector(1, 2) - np.array([1, 2])) < 1e-9).all() and (abs(np.array([1, 2]) - vector(1, 2)) < 1e-9).all()\n"
    tests += "assert np.allclose(Length(np.ones(2)), Length(np.ones(2))) and np.add(Length(1), 2).x == 3"
    assert verdict(program, tests, python_path=[PACKAGES], memory_mb=4096) == "passed"


def test_a_guard_that_a_program_takes_off_fails_the_test() -> None:
    program = f"{AREA}true = Area.__eq__\nclass P:\n    def x(self):\n        Area.__eq__ = true\n        return 5\n"
    assert "the program replaced __eq__" in verdict(program, "assert P().x() == 5")
    assert verdict(program, "Area.__eq__ = lambda *others: True\nassert P().x() == 5") == "passed"


@pytest.mark.parametrize("guard", ["__compare__", "__true__", "__failed__"])
def test_a_program_that_takes_a_guard_from_the_tests_fails_them(guard: str) -> None:
    program = (
        f"class P:\n    def x(self):\n        import __main__\n        vars(__main__)[{guard!r}] = lambda *others: True\n        return 5\n"
    )
    assert verdict(program, "p = P()\nassert p.x() == 5\nassert p.x() == 5").endswith(f"replaced {guard} of a module or class")


FRESH = """
def fresh():
    class Number(float):
        def __sub__(self, other): return 0.0
    return Number(0)
class P:
    def __init__(self): self.total = None
    def __getitem__(self, key): return fresh()
    def __iter__(self): return iter((fresh(), fresh()))
    def x(self): return {'area': fresh(), 'rows': [[fresh()]]}
    def each(self): return (fresh() for _ in range(2))
    def deep(self):
        class Equal:
            def __eq__(self, other): return True
        return {'rows': [[Equal()]]}
    def learn(self): type(self).__sub__ = lambda *others: 0.0
    def nameless(self): raise type('', (BaseException,), {'__traceback__': property(lambda s: None)})()
class Own(float):
    def __sub__(self, other): return Own(0.0)
    __rsub__ = __sub__
class Borrowed(float):
    __module__ = 'builtins'
    __sub__ = float.__mul__
    __eq__ = float.__ne__
    __hash__ = None
class Distance:
    def __abs__(self): return 0.0
class Area:
    def __init__(self, *r): pass
    def __sub__(self, other): return Distance()
    def __rsub__(self, other): return type('Zero', (float,), {})()
"""
FOUND = [
    "assert abs(Area(3) - 28.274) < 1e-3",
    "assert abs(28.274 - Area(3)) < 1e-3",
    "assert abs(Own(1) - 28.274) < 1e-3",
    "assert abs(28.274 - Own(1)) < 1e-3",
    "assert Own(1) - 28.274 == 0",
    "x = Own(1)\nx -= 28.274\nassert x == 0",
    "import math\nassert math.isclose(Own(1) - 28.274, 0, abs_tol=1e-3)",
    "assert Borrowed(0) == 28.274",
    "assert Borrowed(0) - 28.274 == 0",
    "assert [28.274].count(Borrowed(0)) == 1",
    "assert abs(P()[0, 0] - 28.274) < 1e-3",
    "d = P()[0] - 28.274\nassert d == 0",
    "d = P().x()['area'] - 28.274\nassert d == 0",
    "d = P().x()['rows'][0][0] - 28.274\nassert d == 0",
    "a, b = P()\nd = a - 28.274\nassert d == 0",
    "for one in P().each():\n    d = one - 28.274\n    assert d == 0",
    "assert all(one - 28.274 == 0 for one in P().each())",
    "assert P().deep() == {'rows': [[28.274]]}",
    "for one in iter(lambda: P().deep()['rows'][0][0], 28.274): assert False",
    "assert [28.274] in P().deep()['rows']",
    "import unittest\nunittest.TestCase().assertEqual(P().deep(), {'rows': [[28.274]]})",
    "import unittest\nunittest.TestCase().assertIn([28.274], P().deep()['rows'])",
    "p = P()\np.learn()\nd = p - 28.274\nassert d == 0",
    "assert P().nameless() == 5",
]


@pytest.mark.parametrize(("program", "tests"), [(AREA, tests) for tests in LIES] + [(FRESH, tests) for tests in FOUND])
def test_no_operator_of_a_program_decides_about_a_plain_value(program: str, tests: str) -> None:
    said = verdict(program, f"{tests}\nArea(3)")
    assert said.startswith("test 1: failed: "), said


@pytest.mark.parametrize(
    ("change", "tests"),
    [
        ("Fraction._numerator = Fraction._denominator = property(lambda s: 1, lambda s, v: None)", "assert P().x() == Fraction(1, 3)"),
        ("Fraction.from_float = classmethod(lambda c, x: P().x())", "assert P().x() == Fraction.from_float(0.5)"),
    ],
)
def test_descriptors_of_pythons_classes_are_put_back(change: str, tests: str) -> None:
    program = f"from fractions import Fraction\nclass P:\n    def x(self): return Fraction(9, 7)\n{change}\n"
    said = verdict(program, f"from fractions import Fraction\n{tests}\nP()")
    assert said.startswith("test 1: failed: "), said


ITEMS = """
import dataclasses, pathlib
@dataclasses.dataclass
class Item:
    name: object
class Box:
    def __init__(self, *items): self.items = items
    def __contains__(self, item): return item in self.items
class Poly:
    def __init__(self, terms): self.terms, self.used = terms, set(terms)
    def __add__(self, o): return Poly({k: self.terms.get(k, 0) + o.terms.get(k, 0) for k in [*o.terms, *self.terms]})
    def __eq__(self, o): return self.terms == o.terms
"""
IN_UNITTEST = {
    "assertIsInstance(Item(1), Item)": "assertNotIsInstance(Item(1), Item)",
    "assertNotIsInstance(Item(1), Box)": "assertIsInstance(Item(1), Box)",
    "assertIsNotNone(Item(1), 'none')": "assertIsNone(Item(1), 'none')",
    "assertTrue(Item(1), 'none')": "assertFalse(Item(1), 'none')",
    "assertNotEqual(Item(1), None)": "assertEqual(Item(1), None)",
    "assertNotEqual(Item(1), 5)": "assertEqual(Item(1), 5)",
    "assertIsNot(Item(1), None)": "assertIs(Item(1), None)",
    "assertNotIn(Item(1), [])": "assertIn(Item(1), [])",
    "assertIn(Item(1), [Item(2), Item(1)])": "assertNotIn(Item(1), [Item(2), Item(1)])",
    "assertIn(Item(1), Box(Item(1)))": "assertNotIn(Item(1), Box(Item(1)))",
    "assertIn(Item(1), iter([Item(2), Item(1)]))": "assertNotIn(Item(1), iter([Item(2), Item(1)]))",
    "assertIn('a', {'a': Item(1)})": "assertNotIn('a', {'a': Item(1)})",
    "assertIn(Item(1), {'a': Item(1)}.values())": "assertNotIn(Item(1), {'a': Item(1)}.values())",
    "assertEqual({'a': Item(1)}, {'a': Item(1)})": "assertNotEqual({'a': Item(1)}, {'a': Item(1)})",
    "assertEqual(first=Item(1), second=Item(1))": "assertNotEqual(first=Item(1), second=Item(1))",
    "assertEqual(Poly({1: 2}) + Poly({0: 1}), Poly({0: 1, 1: 2}))": "assertNotEqual(Poly({1: 2}) + Poly({0: 1}), Poly({0: 1, 1: 2}))",
    "assertEqual(Item(pathlib.Path('a')), Item(pathlib.Path('a')))": "assertNotEqual(Item(pathlib.Path('a')), Item(pathlib.Path('a')))",
}
"""Asserts that hold, and their opposites."""


@pytest.mark.parametrize("holds", IN_UNITTEST)
def test_unittests_asserts_take_a_programs_objects(holds: str) -> None:
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self."
    assert verdict(ITEMS, f"{tests}{holds}") == "passed"
    said = verdict(ITEMS, f"{tests}{IN_UNITTEST[holds]}")
    assert said.startswith("test 1: failed: "), said


VECTOR = """
import collections, dataclasses, functools, heapq
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __radd__(self, o): return self if o == 0 else NotImplemented
    def __sub__(self, o): return Vector(self.x - o.x, self.y - o.y)
    def __mul__(self, o): return self.x * o.x + self.y * o.y if isinstance(o, Vector) else Vector(self.x * o, self.y * o)
    def __divmod__(self, n): return Vector(self.x // n, self.y // n), Vector(self.x % n, self.y % n)
    def __pow__(self, n): return Vector(self.x ** n, self.y ** n)
    def __imul__(self, n):
        self.x *= n
        self.y *= n
        return self
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y) if isinstance(o, Vector) else NotImplemented
    def __hash__(self): return hash((self.x, self.y))
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
@functools.total_ordering
class Money:
    def __init__(self, n): self.n = n
    def __eq__(self, o): return self.n == (o.n if isinstance(o, Money) else o)
    def __lt__(self, o): return self.n < (o.n if isinstance(o, Money) else o)
    def __add__(self, o): return Money(self.n + (o.n if isinstance(o, Money) else o))
    def __float__(self): return float(self.n)
    __radd__ = __add__
    __hash__ = None
    def is_worth(self, n): return self == n and [n].count(self) == 1 and n in [self] and not self < n
    def less(self, n): return (self + n).n - n
@dataclasses.dataclass(order=True)
class Card:
    rank: int
    suit: str = 'x'
class Stack(list):
    def __eq__(self, o): return list.__eq__(self, o)
    def __iadd__(self, o):
        self.extend(o)
        return self
    def __lt__(self, o): return len(self) < len(o)
    __hash__ = None
class Grid:
    def __init__(self, *rows): self.rows = rows
    def __matmul__(self, o): return Grid(*[[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])
    def __eq__(self, o): return self.rows == o.rows
    def __contains__(self, n): return any(n in r for r in self.rows)
    def __len__(self): return len(self.rows)
    def __getitem__(self, k): return self.rows[k]
def shortest(n):
    @dataclasses.dataclass(order=True)
    class Node:
        cost: int
    class Other:
        def __init__(self, k): self.k = k
        def __lt__(self, o): return self.k < (o.k if isinstance(o, Other) else o)
    heap = [Node(k) for k in range(n, 0, -1)]
    heapq.heapify(heap)
    return heapq.heappop(heap).cost + sum(Other(k) < 2 for k in range(3))
def record(name, *fields):
    def equal(self, o): return type(self) is type(o) and vars(self) == vars(o)
    def init(self, *values): self.__dict__.update(zip(fields, values))
    return type(name, (), {'__init__': init, '__eq__': equal, '__hash__': lambda s: 1})
def comparable(kind):
    kind.__eq__ = lambda s, o: s.n == o.n
    kind.__lt__ = lambda s, o: s.n < o.n
    return kind
"""
RIGHT = [
    "assert Vector(1, 2) * 3 == Vector(3, 6) and Vector(1, 2) * Vector(3, 4) == 11 and abs(Vector(3, 4)) == 5",
    "assert sum([Vector(1, 2), Vector(3, 4)]) == Vector(4, 6) and divmod(Vector(5, 7), 2) == (Vector(2, 3), Vector(1, 1))",
    "v = Vector(1, 2)\nv *= 3\nv += Vector(1, 1)\nv -= Vector(1, 1)\nassert v == Vector(3, 6) and v ** 2 == Vector(9, 36)",
    "import operator\nassert operator.add(Vector(1, 2), Vector(1, 2)) == operator.mul(Vector(1, 2), 2)",
    "assert Vector(1, 2) != 5 and Vector(1, 2) != None and Vector(1, 2) not in [1, 'a'] and Vector(1, 2).__eq__(5) is NotImplemented",
    "assert [Vector(1, 2), 5].index(5) == 1 and [5, Vector(1, 2)].count(Vector(1, 2)) == 1 and len({Vector(1, 2), Vector(1, 2), 5}) == 2",
    "assert {Vector(1, 2): 1, 'a': 2}[Vector(1, 2)] == 1 and {Vector(1, 2)} == {Vector(1, 2)} and not {Vector(1, 2)} & {5}",
    "assert Money(5).is_worth(5) and Money(5).less(3) == 5 and sorted([Money(2), Money(1)])[0].n == 1 and max(Money(1), Money(2)).n == 2",
    "import math, operator\nassert Money(2) + 3 == Money(5) and math.isclose(Money(2), 2.0) and operator.ge(Money(2), Money(1))",
    "total = 0\nfor m in (Money(2), Money(3)): total += m\nassert total == Money(5) and sum([Money(1), Money(2)]).n == 3",
    "from collections import Counter, deque\nassert deque([Money(1), 5]) == deque([Money(1), 5])\nassert Counter([Vector(1, 2)] * 2) == "
    "Counter({Vector(1, 2): 2})",
    "assert Card(1) < Card(2) and Card(1) == Card(1, 'x') and min(Card(3), Card(2)).rank == 2 and [Card(1), Card(2)].index(Card(2)) == 1",
    "s = Stack([1])\ns += [2]\nassert s == [1, 2] and [[1, 2]].count(s) == 1 and len(s) == 2 and Stack() < Stack([1])",
    "assert Grid([1, 2]) @ Grid([3], [4]) == Grid([11]) and 3 in Grid([3]) and len(Grid([1])) == 1 and Grid([1, 2])[0] == [1, 2]",
    "match Vector(1, 2):\n    case Vector(x=1, y=y): assert y == 2\n    case _: assert False\nmatch Vector(1, 2):\n"
    "    case 5: assert False",
    "assert shortest(4) == 3 and Card(1).rank == 1",
    "Point = record('Point', 'x', 'y')\nassert Point(1, 2) == Point(1, 2) and Point(1, 2) != Point(1, 3) and Point(1, 2).x == 1",
    "@comparable\nclass A:\n    def __init__(self, n): self.n = n\nassert A(1) == A(1) and A(1) < A(2) and sorted([A(2), A(1)])[0].n == 1\n"
    "Vector",
    "class W(Vector): pass\nassert W(1, 2) == Vector(1, 2) or True\nassert W(1, 2) + W(1, 2) == Vector(2, 4)",
    "import functools\n@functools.total_ordering\nclass Near:\n    def __init__(self, n): self.n = n\n"
    "    def __eq__(self, o): return abs(self.n - o) < 1\n    def __lt__(self, o): return self.n < o\n"
    "assert Near(5) == 5.5 and [5.5].count(Near(5)) and Near(5) >= 4 and Vector",
    "class Own:\n    def __eq__(self, o): return o.x == 1\nassert Own() == Vector(1, 2) or [Own()].count(Vector(1, 2))",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
    "        self.assertEqual(Vector(1, 2) + Vector(1, 1), Vector(2, 3))\n"
    "        self.assertNotEqual(Vector(1, 2), Vector(1, 3))\n        self.assertLess(Money(1), Money(2))\n"
    "        with self.assertRaises(AttributeError): Vector(1, 2) + 5\n        self.assertIn(Card(1), [Card(1)])",
    "from unittest.mock import Mock\nm = Mock()\nm(Vector(1, 2))\nm.assert_called_once_with(Vector(1, 2))\nassert m.call_count == 1",
    "assert Money(1) <= Money(1) and 'a %s' % Vector != 5",
]


@pytest.mark.parametrize("tests", RIGHT)
def test_operators_between_a_programs_objects_and_in_its_own_code_work(tests: str) -> None:
    assert verdict(VECTOR, tests) == "passed"


def test_a_large_table_may_be_read_item_by_item() -> None:
    program = "class Table:\n    def __init__(self, n): self.rows = [[i * j for j in range(n)] for i in range(n)]\n"
    tests = "t = Table(100)\nfor i in range(100):\n    for j in range(100):\n        assert t.rows[i][j] == i * j"
    assert verdict(program, tests) == "passed"


def test_what_equals_everything_does_so_only_if_the_tests_name_it() -> None:
    program = "from unittest.mock import ANY, Mock\nclass K: pass\nclass P:\n    x = ANY\n    def ok(self): return self.x == 5\n"
    for tests in ("assert P().x == 5", "assert P().x == K()", "assert [5].count(P().x)", "assert not P().x != 5"):
        assert verdict(program, tests).startswith("test 1: failed: AssertionError"), tests
    mocked = "from unittest.mock import ANY\nassert P().x == ANY == 5 and [5].count(ANY)"
    assert verdict(program, mocked) == verdict(program, "assert P().ok() and P().x is P().x and P().x == P().x") == "passed"


def test_classes_of_modules_that_only_the_program_imports_keep_their_operators() -> None:
    program = "class P:\n    def number(self):\n        from _pydecimal import Decimal\n        return Decimal(5)\n"
    program += "    def spread(self):\n        import statistics as s\n        return s.NormalDist(1, 2)\n"
    assert verdict(program, "assert P().number() == 5 and P().number() - 5 == 0 and [5].count(P().number())") == "passed"
    assert verdict(program, "assert P().spread() + 1 == P().spread() + 1 and (P().spread() * 2).mean == 2") == "passed"
