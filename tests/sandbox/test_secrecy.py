"""What a program finds in its own memory: nothing of earlier programs, nothing of what is expected of it."""

from __future__ import annotations

import json
import uuid

import pytest
from sandbox.running import PATIENT, asserts

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.code.reward import CodeReward
from roll_lite.sandbox.pool import Program, Sandbox, SandboxPool

pytestmark = pytest.mark.usefixtures("works_after")

SCAN = """
import ctypes, gc, os, re
PAGE = 4096
libc = ctypes.CDLL(None)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
libc.sbrk.restype = ctypes.c_void_p

def regions():
    try:
        with open("/proc/self/maps") as maps:
            for line in maps.read().splitlines():
                if " rw" in line:
                    first, last = line.split()[0].split("-")
                    yield int(first, 16), int(last, 16)
    except OSError:  # no /proc: the C heap, and wherever Python keeps an object
        yield libc.sbrk(0) - (64 << 20), libc.sbrk(0)
        for place in {id(one) >> 20 for one in gc.get_objects()}:
            yield (place - 1) << 20, (place + 2) << 20

def pages():
    here, there = os.pipe()
    for first, last in regions():
        before = b""
        for page in range(first & -PAGE, last, PAGE):
            if libc.write(there, page, PAGE) == PAGE:
                before = before[-PAGE:] + os.read(here, PAGE)
                yield before

def planted():
    seen = set()
    for page in pages():
        seen.update(re.findall(rb"planted-[0-9a-f]{32}", page))
    return sorted(one.decode() for one in seen)
"""
OWN = f"planted-{'0' * 32}"
"""Shows that the search finds what there is."""


def mark() -> str:
    return f"planted-{uuid.uuid4().hex}"


def test_nothing_of_an_earlier_program(sandbox: Sandbox) -> None:
    def found() -> list[str]:
        source = f"{SCAN}\nown = 'planted' + '-' + '0' * 32\nimport json\nprint(json.dumps(planted()))"
        return list(json.loads(sandbox.run(Program({"kind": "script", "source": source}, limits=PATIENT)).stdout))

    earlier = Program({"kind": "script", "source": f"x = {mark()!r}\nprint(input())"}, stdin=mark().encode(), limits=PATIENT)
    assert sandbox.run(earlier).stdout.startswith(b"planted-")
    assert found() == [OWN]
    call = {"kind": "calls", "source": "def f(x): return x", "function": "f", "calls": [[[mark()], {"d": []}]]}
    ran = sandbox.run(Program(call | {"test_s": 30.0, "wall_s": 99.0, "most_bytes": 1 << 20}, limits=PATIENT))
    assert b"planted-" in ran.result
    assert found() == [OWN]
    sandbox.run(asserts("def f(x): return x", f"x = {mark()!r}\nassert f(x) == x").tests)  # tests without a program
    assert found() == [OWN]


def test_nothing_of_the_asserts_that_call_it(sandbox: Sandbox) -> None:
    pool = SandboxPool(1, walls=sandbox._settings["walls"])
    try:
        for _ in range(2):  # also where the same sandboxes have run these tests before
            tests = f"assert f({OWN!r}) == [{OWN!r}], f('')\nassert f('') != {mark()!r}"
            assert pool.run(asserts(f"{SCAN}\ndef f(x): return planted()", tests)).result == b'{"error": ""}\n'
    finally:
        pool.close()


def test_nothing_of_the_output_that_is_expected() -> None:
    source = f"{SCAN}\nprint(len(planted()))"
    sample = RewardInput("", "", f"```python\n{source}\n```", json.dumps([{"stdin": "", "stdout": mark()}] * 2), {}, "stop")
    [score] = CodeReward(test_s=30.0, wall_s=100.0, total_s=60.0, fail_fast=False)([sample])
    assert isinstance(score, Score) and score.value == 0.0
    assert str(score.details["verdict"]).startswith("test 1: printed '0\\n'"), score
