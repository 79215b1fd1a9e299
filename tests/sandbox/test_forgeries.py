"""Programs that would decide their own verdict."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from sandbox.running import PATIENT, asserts, run, said

from roll_lite.sandbox.pool import Program, Sandbox, SandboxPool
from roll_lite.sandbox.values import decode, encode

pytestmark = pytest.mark.usefixtures("works_after")


def test_exit_is_no_pass(sandbox: Sandbox) -> None:
    call = {"kind": "calls", "function": "f", "calls": [], "test_s": 5.0}
    for source in ("import os; os._exit(0)", "import sys; sys.exit(0)", "def f():\n    import os; os._exit(0)"):
        outcome = sandbox.run(Program({**call, "source": source}, limits=PATIENT))
        assert outcome.result == b""
    assert run(sandbox, "import os, signal; os.kill(os.getpid(), signal.SIGKILL); os._exit(9)").exit != 0


def test_no_files_of_the_trusted_side_are_open(sandbox: Sandbox) -> None:
    source = """
import os, stat
kinds = []
for fd in range(3, 300):
    try: kinds.append((fd, stat.S_ISREG(os.fstat(fd).st_mode)))
    except OSError: pass
print(kinds)
"""
    assert said(sandbox, source) == "[(3, True)]\n"


def test_what_one_program_patches_the_next_does_not_see(sandbox: Sandbox) -> None:
    patch = """
import builtins, json, sys
builtins.print = builtins.eval = None
json.dumps = lambda *a, **k: '{"value": true}'
sys.modules['json'] = None
"""
    assert run(sandbox, patch).exit == 0
    assert said(sandbox, "import json; print(json.dumps([1]))") == "[1]\n"


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(2)
    yield pool
    pool.close()


CHEATS = {
    "equal to all": "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\ndef f(x): return E()",
    "int that is equal to all": "class E(int):\n    def __eq__(self, o): return True\ndef f(x): return E(0)",
    "exit": "import os\ndef f(x): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "no assert error": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 0",
    "patches the tests": "import sys\nfor m in list(sys.modules.values()):\n    for n in list(vars(m)) if m else ():\n"
    "        if n in ('decode', 'encode', 'dump'): setattr(m, n, lambda *a, **k: {'value': True})\ndef f(x): return 0",
    "writes the verdict": "import os\nfor fd in range(3, 9):\n"
    '    try: os.write(fd, b\'{"error": ""}\\n\')\n    except OSError: pass\ndef f(x): return 0',
    "floods": "import os\nwhile True: os.write(4, b'x' * 65536)",
    "raises": "def f(x): raise AssertionError('passed')",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_forged_verdicts(pool: SandboxPool, cheat: str) -> None:
    def error(source: str) -> str:
        return str(json.loads(pool.run(asserts(source, "assert f(20) == 42\nassert f(1) == 4")).result)["error"])

    assert error(CHEATS[cheat]) and not error("def f(x): return 2 * x + 2")


COLLIDING = [k * (2**61 - 1) for k in range(1, 40_000)]


@pytest.mark.parametrize(
    "sent",
    [
        {"o": ["Fraction", ["1e99999999"]]},
        {"o": ["Fraction", ["1e99999999", 1]]},
        {"o": ["range", ["9", 1, 1]]},
        {"o": ["Decimal", ["9" * 1_000_000]]},
        {"s": [{"i": hex(number)} for number in COLLIDING]},
        {"d": [[{"i": hex(number)}, 0] for number in COLLIDING]},
        {"o": ["frozenset", [[{"i": hex(number)} for number in COLLIDING]]]},
        {"o": ["OrderedDict", [[{"t": [{"i": hex(number)}, 0]} for number in COLLIDING]]]},
        {"o": ["Fraction", [{"i": "0x" + "f" * 4_000_000}, {"i": "0x" + "e" * 3_000_001}]]},
    ],
    ids=[
        "fraction of a text",
        "fraction of a text and a number",
        "range of texts",
        "long decimal",
        "set",
        "dict",
        "frozenset",
        "ordered dict",
        "fraction",
    ],
)
def test_no_value_takes_long_to_read(sent: Any) -> None:
    started = time.thread_time()
    with pytest.raises(ValueError):
        decode(sent)
    assert time.thread_time() - started < 2


def test_plain_values_are_read() -> None:
    for value in (Fraction(1, 3), Decimal("1.5"), range(3), {1, 2}, frozenset({1}), {"a": [1]}, set(range(5000)), Counter("aab")):
        assert decode(encode(value)) == value
