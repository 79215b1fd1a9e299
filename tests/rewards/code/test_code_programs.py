"""Programs of the kinds that public data sets hold: what is right passes however it reads, writes and ends, and what is wrong does not."""

from __future__ import annotations

from typing import Any

import pytest
from rewards.code.test_code_asserts import verdict

PRINTS = {
    "sum ints": ("print(sum(map(int, input().split())))", "1 2 3", "6"),
    "sys.stdin.read": ("import sys\nd=sys.stdin.read().split()\nn=int(d[0])\nprint(sum(map(int,d[1:n+1])))", "3\n1 2 3", "6"),
    "buffer readline": (
        """
import sys
input=sys.stdin.buffer.readline
n=int(input())
print(sum(int(input()) for _ in range(n)))
""",
        "2\n1\n5\n",
        "6",
    ),
    "stdin loop": (
        """
import sys
for line in sys.stdin:
    line=line.strip()
    if not line: break
    print(line[::-1])
""",
        "ab\ncd\n\n",
        "ba\ndc",
    ),
    "EOFError loop": ("while True:\n    try: print(int(input())*2)\n    except EOFError: break", "1\n2\n", "2\n4"),
    "os.read": ("import os,io\ninput=io.BytesIO(os.read(0,os.fstat(0).st_size)).readline\nprint(int(input())+1)", "4\n", "5"),
    "pypy fastio": (
        """
import os,sys
from io import BytesIO, IOBase
class FastIO(IOBase):
    newlines=0
    def __init__(self,file):
        self._fd=file.fileno(); self.buffer=BytesIO(); self.writable='x' in file.mode or 'r' not in file.mode
        self.write=self.buffer.write if self.writable else None
    def read(self):
        while True:
            b=os.read(self._fd,max(os.fstat(self._fd).st_size,8192))
            if not b: break
            ptr=self.buffer.tell(); self.buffer.seek(0,2),self.buffer.write(b),self.buffer.seek(ptr)
        self.newlines=0
        return self.buffer.read()
    def readline(self):
        while self.newlines==0:
            b=os.read(self._fd,max(os.fstat(self._fd).st_size,8192))
            self.newlines=b.count(b'\\n')+(not b)
            ptr=self.buffer.tell(); self.buffer.seek(0,2),self.buffer.write(b),self.buffer.seek(ptr)
        self.newlines-=1
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd,self.buffer.getvalue()); self.buffer.truncate(0),self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self,file):
        self.buffer=FastIO(file); self.flush=self.buffer.flush; self.writable=self.buffer.writable
        self.write=lambda s:self.buffer.write(s.encode('ascii'))
        self.read=lambda:self.buffer.read().decode('ascii')
        self.readline=lambda:self.buffer.readline().decode('ascii')
sys.stdin,sys.stdout=IOWrapper(sys.stdin),IOWrapper(sys.stdout)
input=lambda:sys.stdin.readline().rstrip('\\r\\n')
print(int(input())+1)
sys.stdout.flush()
""",
        "4\n",
        "5",
    ),
    "open(0)": ("n,*a=map(int,open(0).read().split())\nprint(sum(a))", "2 3 4", "7"),
    "open /dev/stdin": ("print(open('/dev/stdin').read().strip()[::-1])", "abc", "cba"),
    "recursion deep": ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n==0 else 1+f(n-1)\nprint(f(50000))", "", "50000"),
    "recursion thread": (
        """
import sys,threading
sys.setrecursionlimit(10**6)
threading.stack_size(1<<27)
def f(n): return 0 if n==0 else 1+f(n-1)
def main(): print(f(90000))
t=threading.Thread(target=main)
t.start()
t.join()
""",
        "",
        "90000",
    ),
    "sys.exit": ("import sys\nprint(1)\nsys.exit()", "", "1"),
    "exit()": ("print(1)\nexit(0)", "", "1"),
    "quit": ("print(1)\nquit()", "", "1"),
    "raise SystemExit": ("print(1)\nraise SystemExit", "", "1"),
    "os._exit": ("import os,sys\nprint(1)\nsys.stdout.flush()\nos._exit(0)", "", "1"),
    "main guard": ("def main():\n    print(input())\nif __name__=='__main__':\n    main()", "x", "x"),
    "decimal": (
        "from decimal import *\ngetcontext().prec=50\nprint(Decimal(1)/Decimal(7))",
        "",
        "0.14285714285714285714285714285714285714285714285714",
    ),
    "int digits limit": ("import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(10**5000)))", "", "5001"),
    "lru_cache": (
        "from functools import *\n@lru_cache(None)\ndef f(n): return n if n<2 else f(n-1)+f(n-2)\nprint(f(90))",
        "",
        "2880067194370816120",
    ),
    "heapq dijkstra": (
        """
import heapq
from collections import defaultdict
g=defaultdict(list)
g[0].append((1,5))
d={0:0}
q=[(0,0)]
while q:
    c,u=heapq.heappop(q)
    for v,w in g[u]:
        if c+w<d.get(v,1e9): d[v]=c+w; heapq.heappush(q,(d[v],v))
print(d[1])
""",
        "",
        "5",
    ),
    "stderr debug": ("import sys\nprint('dbg',file=sys.stderr)\nprint(3)", "", "3"),
    "unicode": ("print('é'+input())", "ü", "éü"),
    "walrus/match": ("match (n:=int(input())):\n    case 1: print('one')\n    case _: print('other')", "1", "one"),
    "print flush": ("print(1, flush=True)\nprint(2, end='')", "", "1\n2"),
    "buffer write first": ("import sys\nsys.stdout.buffer.write(b'b\\n')\nprint('c')", "", "b\nc"),
    "random seed": ("import random\nrandom.seed(1)\nprint(random.randint(1,6) in range(1,7))", "", "True"),
    "time": ("import time\nt=time.time()\ntime.sleep(0.05)\nprint(time.time()-t<3)", "", "True"),
    "typing": (
        """
from typing import List, Optional, Dict
from dataclasses import dataclass, field
@dataclass(order=True)
class A:
    x: int
    y: List[int] = field(default_factory=list)
print(sorted([A(2),A(1)])[0])
""",
        "",
        "A(x=1, y=[])",
    ),
    "future annotations": ("from __future__ import annotations\ndef f(x: Foo) -> Bar: return x\nprint(f(1))", "", "1"),
    "global class nodes": (
        """
class Node:
    __slots__=('v','n')
    def __init__(s,v): s.v=v; s.n=None
h=None
for i in range(100000):
    n=Node(i); n.n=h; h=n
c=0
while h: c+=1; h=h.n
print(c)
""",
        "",
        "100000",
    ),
    "long linked list del": ("class N:\n    def __init__(s,n): s.n=n\nh=None\nfor i in range(300000): h=N(h)\nprint('ok')", "", "ok"),
    "bytes in": ("import sys\nd=sys.stdin.buffer.read()\nprint(len(d))", "abc\n", "4"),
    "array mem 100MB": ("a=[0]*(10**7)\nprint(len(a))", "", "10000000"),
    "set ops": ("a=set(range(10**6))\nprint(len(a&set(range(5*10**5,2*10**6))))", "", "500000"),
    "thread pool": (
        """
from concurrent.futures import ThreadPoolExecutor as T
with T(8) as p: print(sum(p.map(lambda x:x*x, range(100))))
""",
        "",
        "328350",
    ),
    "process pool": (
        """
from concurrent.futures import ProcessPoolExecutor as T
def f(x): return x*x
if __name__=='__main__':
    with T(4) as p: print(sum(p.map(f, range(100))))
""",
        "",
        "328350",
    ),
    "asyncio": (
        """
import asyncio
async def f(i):
    await asyncio.sleep(0.01)
    return i
async def main(): print(sum(await asyncio.gather(*map(f, range(10)))))
asyncio.run(main())
""",
        "",
        "45",
    ),
    "input prompt": ("n=int(input('n? '))\nprint(n)", "4", "n? 4"),
    "sys.argv": ("import sys\nprint(len(sys.argv))", "", "1"),
    "__file__": ("import os\nprint(os.path.basename(__file__))", "", "main.py"),
    "locals exec": ("exec('x=1')\nprint(x, eval('x+1'))", "", "1 2"),
    "pickle": ("import pickle\nclass A: pass\na=A(); a.x=1\nprint(pickle.loads(pickle.dumps(a)).x)", "", "1"),
    "inspect source": ("import inspect\ndef f(): return 1\nprint(inspect.getsource(f).strip())", "", "def f(): return 1"),
    "tracemalloc": ("import tracemalloc\ntracemalloc.start()\nx=[1]*1000\nprint(tracemalloc.get_traced_memory()[0]>0)", "", "True"),
    "weakref": ("import weakref\nclass A: pass\na=A(); r=weakref.ref(a); del a\nprint(r() is None)", "", "True"),
    "reliability guard": ("import resource\nresource.setrlimit(resource.RLIMIT_STACK,(1<<22,1<<22))\nprint(1)", "", "1"),
    "raise stack": (
        """
import resource
try: resource.setrlimit(resource.RLIMIT_STACK,(resource.RLIM_INFINITY,resource.RLIM_INFINITY))
except Exception: pass
print(1)
""",
        "",
        "1",
    ),
    "gc": ("import gc\ngc.disable()\nprint(gc.isenabled())", "", "False"),
    "subprocess": ("import subprocess\nprint(subprocess.check_output(['echo','hi'],text=True).strip())", "", "hi"),
    "uuid/secrets": ("import uuid,secrets\nprint(len(str(uuid.uuid4())), len(secrets.token_hex(4)))", "", "36 8"),
    "hashlib": ("import hashlib\nprint(hashlib.md5(b'a').hexdigest()[:4])", "", "0cc1"),
    "datetime": ("from datetime import *\nprint((date(2024,3,1)-date(2024,2,1)).days)", "", "29"),
    "locale": ("import locale\nlocale.setlocale(locale.LC_ALL,'')\nprint(f'{1234567:,}')", "", "1,234,567"),
    "csv/json": ("import csv,io,json\nprint(json.dumps(list(csv.reader(io.StringIO('a,b')))))", "", '[["a", "b"]]'),
    "stdin tty": ("import sys\nprint(sys.stdin.isatty())", "", "False"),
    "seek stdin": ("import sys\nsys.stdin.readline()\nprint(sys.stdin.readline().strip())", "a\nb\n", "b"),
    "fileinput": ("import fileinput\nprint(sum(int(x) for x in fileinput.input()))", "1\n2\n", "3"),
    "write read file": ("open('o.txt','w').write('hi')\nprint(open('o.txt').read())", "", "hi"),
    "pathlib home": ("from pathlib import Path\n(Path.home()/'x').write_text('a')\nprint((Path.home()/'x').exists())", "", "True"),
    "getpass/platform": ("import platform\nprint(platform.system())", "", "Linux"),
    "faulthandler": ("import faulthandler\nfaulthandler.enable()\nprint(1)", "", "1"),
    "print CRLF in": ("a=input()\nprint(a.strip(), len(a.strip()))", "ab\r\ncd\r\n", "ab 2"),
    "contextlib redirect": (
        """
import contextlib,io
b=io.StringIO()
with contextlib.redirect_stdout(b): print('x')
print(b.getvalue().strip()*2)
""",
        "",
        "xx",
    ),
    "generators": ("def g():\n    yield from range(5)\nprint(*g())", "", "0 1 2 3 4"),
    "metaclass": ("class M(type):\n    def __call__(c,*a): return 5\nclass A(metaclass=M): pass\nprint(A())", "", "5"),
    "singleton thread": (
        """
import threading
l=threading.Lock()
c=0
def f():
    global c
    for _ in range(1000):
        with l: c+=1
ts=[threading.Thread(target=f) for _ in range(10)]
[t.start() for t in ts]; [t.join() for t in ts]
print(c)
""",
        "",
        "10000",
    ),
    "daemon thread": ("import threading,time\nthreading.Thread(target=time.sleep,args=(100,),daemon=True).start()\nprint(1)", "", "1"),
    "timer": ("import threading\nt=threading.Timer(0.05,lambda: print('t'))\nt.start()\nt.join()", "", "t"),
    "sched/queue": ("import queue\nq=queue.PriorityQueue()\nq.put((2,'b'));q.put((1,'a'))\nprint(q.get()[1])", "", "a"),
    "warnings": ("import warnings\nwarnings.warn('x')\nprint(1)", "", "1"),
    "traceback print": ("import traceback\ntry: 1/0\nexcept ZeroDivisionError: traceback.print_exc()\nprint('done')", "", "done"),
    "del builtins": ("list=[1]\nprint(list)", "", "[1]"),
    "iter input": ("for l in iter(input, ''): print(l)", "a\nb\n\n", "a\nb"),
    "shebang/coding": ("#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\nprint('ok')", "", "ok"),
    "tabs": ("if True:\n\tprint('ok')", "", "ok"),
    "bisect.sorted": ("import bisect\na=[]\nfor x in (3,1,2): bisect.insort(a,x)\nprint(a)", "", "[1, 2, 3]"),
    "much, at once": ("print('\\n'.join(map(str, range(100_000))))", "", "\n".join(map(str, range(100_000)))),
    "much, bit by bit": ("for i in range(30_000): print(i)", "", "\n".join(map(str, range(30_000)))),
}


@pytest.mark.parametrize("case", PRINTS)
def test_it_prints_what_it_has_to(case: str) -> None:
    program, stdin, stdout = PRINTS[case]
    assert verdict(f"```python\n{program}\n```", [{"stdin": stdin, "stdout": stdout}]) == "passed"


def cases(*given: tuple[list[Any], Any]) -> list[dict[str, Any]]:
    return [{"args": args, "expected": expected} for args, expected in given]


RETURNS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "two sum": (
        """
from typing import *
class Solution:
    def f(self, nums: List[int], target: int) -> List[int]:
        d={}
        for i,x in enumerate(nums):
            if target-x in d: return [d[target-x],i]
            d[x]=i
""",
        cases(([[2, 7], 9], [0, 1])),
    ),
    "state between": (
        "class Solution:\n    memo={}\n    def f(self,n):\n        self.memo[n]=1\n        return len(self.memo)",
        cases(([1], 1), ([2], 1)),
    ),
    "init state": (
        """
class Solution:
    def __init__(self): self.r=[]
    def f(self,n):
        self.r.append(n)
        return self.r
""",
        cases(([1], [1]), ([2], [2])),
    ),
    "in place": ("class Solution:\n    def f(self, m): m.reverse()", cases(([[1, 2, 3]], [3, 2, 1]))),
    "generator": ("def f(n):\n    for i in range(n): yield i", cases(([3], [0, 1, 2]))),
    "map obj": ("def f(n): return map(str, n)", cases(([[1, 2]], ["1", "2"]))),
    "dict keys": ("def f(n): return {1:'a'}.keys()", cases(([1], [1]))),
    "dict values": ("def f(n): return {1:'a'}.values()", cases(([1], ["a"]))),
    "dict items": ("def f(n): return {1:'a'}.items()", cases(([1], [[1, "a"]]))),
    "tuple": ("def f(n): return (1,2)", cases(([1], [1, 2]))),
    "intkeys": ("def f(n): return {1:2}", cases(([1], {"1": 2}))),
    "float eps": ("def f(n): return 0.1+0.2", cases(([1], 0.3))),
    "float int": ("def f(n): return 6/2", cases(([1], 3))),
    "none": ("def f(n): return None", cases(([1], None))),
    "str": ("def f(n): return n[::-1]", cases((["abc"], "cba"))),
    "bigint": ("def f(n): return 2**200", cases(([1], 1606938044258990275541962092341162602522202993782792835301376))),
    "nested": ("def f(n): return [[1,[2]],{'a':(1,)}]", cases(([1], [[1, [2]], {"a": [1]}]))),
    "prints": ("def f(n):\n    print('debug')\n    return n", cases(([1], 1))),
    "namedtuple": ("from collections import namedtuple\nP=namedtuple('P','x y')\ndef f(n): return P(1,2)", cases(([1], [1, 2]))),
    "intenum": ("from enum import IntEnum\nclass E(IntEnum):\n    A=1\ndef f(n): return E.A", cases(([1], 1))),
    "defaultdict": ("from collections import *\ndef f(n):\n    d=defaultdict(int); d['a']+=1\n    return d", cases(([1], {"a": 1}))),
    "counter": ("from collections import *\ndef f(n): return Counter('aab')", cases(([1], {"a": 2, "b": 1}))),
    "numpy-like int": ("class I(int): pass\ndef f(n): return I(5)", cases(([1], 5))),
    "static": ("class Solution:\n    @staticmethod\n    def f(n): return n", cases(([1], 1))),
    "class method": ("class Solution:\n    @classmethod\n    def f(cls, n): return n", cases(([1], 1))),
    "lambda": ("f = lambda n: n", cases(([1], 1))),
    "partial": ("from functools import partial\nf = partial(pow, 2)", cases(([3], 8))),
    "cached": (
        """
from functools import cache
class Solution:
    def f(self,n):
        @cache
        def g(i): return 1 if i<2 else g(i-1)+g(i-2)
        return g(n)
""",
        cases(([30], 1346269)),
    ),
    "deep recursion": ("class Solution:\n    def f(self,n): return 0 if n==0 else 1+self.f(n-1)", cases(([15000], 15000))),
    "recursion set small": (
        """
import sys
sys.setrecursionlimit(3000)
class Solution:
    def f(self,n): return 0 if n==0 else 1+self.f(n-1)
""",
        cases(([900], 900)),
    ),
    "example use": (
        """
class Solution:
    def f(self,n): return n
if __name__=='__main__':
    print(Solution().f(int(input())))
""",
        cases(([1], 1)),
    ),
    "raises at example": ("class Solution:\n    def f(self,n): return n\nprint(Solution().f(2))", cases(([1], 1))),
    "sys.exit at end": (
        "class Solution:\n    def f(self,n): return n\nif __name__=='__main__':\n    import sys; sys.exit(0)",
        cases(([1], 1)),
    ),
}


@pytest.mark.parametrize("case", RETURNS)
def test_it_returns_what_it_has_to(case: str) -> None:
    program, tests = RETURNS[case]
    assert verdict(program, tests, {"fn_name": "f"}) == "passed"


WRONG: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "in place nothing": ("class Solution:\n    def f(self, m): pass", cases(([[1, 2, 3]], [3, 2, 1]))),
    "set vs list": ("def f(n): return {1,2}", cases(([1], [1, 2]))),
    "bool int": ("def f(n): return 1", cases(([1], True))),
    "exit with value": ("import os,json\ndef f(n):\n    os.write(3, b'{\"value\": 5}')\n    os._exit(0)", cases(([1], 6))),
    "json patched": ('import json\njson.dumps=lambda *a,**k:\'{"value": 0, "value": 1}\'\ndef f(n): return 0', cases(([1], 6))),
    "nan equals": ("def f(n): return float('nan')", cases(([1], 6))),
    "inf": ("def f(n): return float('inf')", cases(([1], 1e308))),
    "inf2": ("def f(n): return 10**400", cases(([1], 1e308))),
    "eq obj": ("class E:\n    def __eq__(s,o): return True\ndef f(n): return E()", cases(([1], 6))),
    "dict str keys dup": ("def f(n): return {1:0, '1':2}", cases(([1], {"1": 5}))),
    "dict dup keys collide": ("def f(n): return {1:0, '1':5, True:0}", cases(([1], {"1": 0, "2": 0}))),
    "huge nest": ("def f(n):\n    x=[]\n    for _ in range(5000): x=[x]\n    return x", cases(([1], []))),
    "changed trick": ("def f(n):\n    n.clear(); n.extend([9])", cases(([[1]], [2]))),
    "in place identity": ("def f(n): pass", cases(([[1]], [1]), ([[2]], [3]))),
    "value null changed str": ('import os\nos.write(3,b\'{"value":null,"changed":[1]}\')\nos._exit(0)', cases(([1], [2]))),
    "result too deep json": ("import os\nos.write(3,b'['*100000)\nos._exit(0)", cases(([1], [2]))),
    "result bigint json": ("import os\nos.write(3,b'{\"value\": '+b'9'*500000+b'}')\nos._exit(0)", cases(([1], [2]))),
    "result float 1e999": ("import os\nos.write(3,b'{\"value\": 1e999}')\nos._exit(0)", cases(([1], 6.0))),
    "result surrogate": ("def f(n): return chr(0xd800)*5", cases(([1], "a"))),
    "result NaN literal": ("import os\nos.write(3,b'{\"value\": NaN}')\nos._exit(0)", cases(([1], 6.0))),
    "bytes": ("def f(n): return b'a'", cases(([1], "a"))),
    "decimal nan": ("from decimal import Decimal\ndef f(n): return Decimal('NaN')", cases(([1], 6))),
    "decimal snan": ("from decimal import Decimal\ndef f(n): return Decimal('sNaN')", cases(([1], 6))),
    "decimal huge exp": ("from decimal import Decimal\ndef f(n): return Decimal('1e999999999')", cases(([1], 6))),
    "decimal huge exp float": ("from decimal import Decimal\ndef f(n): return Decimal('1e999999')", cases(([1], 6.5))),
    "frac huge": ("from fractions import Fraction\ndef f(n): return Fraction(10**9999, 3)", cases(([1], 6.5))),
    "range huge": ("def f(n): return range(10**18)", cases(([1], [1]))),
    "shared refs bomb": ("def f(n):\n    x=[1]\n    for _ in range(40): x=[x,x]\n    return x", cases(([1], [1]))),
    "timedelta": ("import datetime\ndef f(n): return datetime.timedelta.max", cases(([1], [1]))),
    "complex": ("def f(n): return 6+0j", cases(([1], 6))),
    "str subclass": (
        "class S(str):\n    def __eq__(s,o): return True\n    __hash__=str.__hash__\ndef f(n): return S('a')",
        cases(([1], "b")),
    ),
    "set eq": ("class S(set):\n    def __eq__(s,o): return True\ndef f(n): return S()", cases(([1], [1]))),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_returns_something_else(case: str) -> None:
    program, tests = WRONG[case]
    said = verdict(program, tests, {"fn_name": "f"}, test_s=1.0)
    assert said != "passed" and not said.startswith("cause"), said
