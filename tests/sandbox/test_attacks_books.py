"""Programs that falsify what is read of them, or end the sandbox that watches them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from sandbox.running import LIMITS, PATIENT, asserts, run

from roll_lite.sandbox.filesystem import fits
from roll_lite.sandbox.pool import HARMLESS, Outcome, Pair, Program, Protections, Sandbox, SandboxDied, SandboxPool

NAME = "import ctypes, os, time, threading\nlibc = ctypes.CDLL(None)\n"


@pytest.mark.parametrize("name", [r"\rVmPTE:", r"\rThreads: x", r"\x1cVmSwap: -9", r"\x0b1 2 3", r"\rVmPTE: -999999"])
def test_a_program_may_be_called_as_it_likes(sandbox: Sandbox, name: str) -> None:
    outcome = run(sandbox, f"{NAME}libc.prctl(15, b'{name}', 0, 0, 0)\ntime.sleep(0.4)\nprint('done')", PATIENT)
    assert (outcome.exit, outcome.stopped, outcome.stdout) == (0, "", b"done\n")


MEMORY = f"""{NAME}
libc.prctl(15, b'\\rVmPTE: -999999', 0, 0, 0)
x = bytearray(b'x') * (450 << 20)
time.sleep(90)
"""
WITHOUT_ITS_FIRST_THREAD = f"""{NAME}
def work():
    time.sleep(0.15)
    x = bytearray(b'x') * (450 << 20)
    time.sleep(90)
threading.Thread(target=work).start()
libc.syscall(60, 0)
"""


@pytest.mark.parametrize("source", [MEMORY, WITHOUT_ITS_FIRST_THREAD], ids=["name", "first thread gone"])
def test_memory_is_counted_whatever_a_process_shows_first(sandbox: Sandbox, source: str) -> None:
    """256 MB are allowed in use, and twice as much as address space."""
    outcome = run(sandbox, source, PATIENT)
    assert outcome.stopped == "memory", outcome


def test_a_name_in_the_table_of_mappings_breaks_nothing(sandbox: Sandbox) -> None:
    source = """
import mmap, os, time
place = 'x\\r0 0 0 0 zz ' + os.getcwd()
os.makedirs(place)
with open(f'{place}/y', 'wb') as file: file.write(bytes(8192))
with open(f'{place}/y', 'rb') as file: kept = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
os.unlink(f'{place}/y')
time.sleep(0.4)
print('done')
"""
    outcome = run(sandbox, source, PATIENT)
    assert (outcome.exit, outcome.stopped, outcome.stdout) == (0, "", b"done\n"), outcome


def test_timers_are_few(sandbox: Sandbox) -> None:
    source = f"""{NAME}
made = 0
timer = ctypes.c_void_p()
while made < 2000 and libc.syscall(222, 1, 0, ctypes.byref(timer)) == 0: made += 1
print(made < 1000)
"""
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of system calls differ")
    assert run(sandbox, source, PATIENT).stdout == b"True\n"


def test_looking_into_a_folder_goes_through_no_link(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "large").write_bytes(bytes(1 << 20))
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    assert fits(str(inside), 1 << 19, 10)
    assert fits(str(inside / "link"), 1 << 19, 10)  # as if it had been a folder a moment ago
    assert outside.stat().st_mode & 0o777 == 0o755


# ---------------------------------------------------------------- a sandbox that dies


class Mortal(Sandbox):
    """Dies of some programs, or of all."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.runs = of, 0

    def finish(self) -> Outcome:
        self.runs += 1
        assert self._running is not None
        source = self._running[0].order["source"]
        if self.of in source or (self.of == "once" and self.runs == 1):
            self.close()
            raise SandboxDied("the sandbox died")
        return super().finish()


def ended(of: str, job: Program | Pair) -> object:
    pool = SandboxPool(1)
    pool._sandboxes = [Mortal(of)]
    try:
        (outcome,) = pool.run_many([job])
        return outcome
    finally:
        pool.close()


KILLER = Program({"kind": "script", "source": "print('killer')"}, limits=LIMITS)


def test_a_program_that_ends_two_sandboxes_where_another_lives_is_to_blame() -> None:
    outcome = ended("killer", KILLER)
    assert isinstance(outcome, Outcome) and (outcome.exit, outcome.stopped) == (-signal.SIGKILL, "sandbox")


def test_a_sandbox_that_died_for_another_reason_costs_nothing() -> None:
    outcome = ended("once", KILLER)
    assert isinstance(outcome, Outcome) and outcome.stdout == b"killer\n"


def test_where_no_program_lives_it_is_nobodys_fault() -> None:
    started = time.monotonic()
    assert HARMLESS.order["source"] == ""
    assert isinstance(ended("", KILLER), SandboxDied)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_program_does_not_wait_for_its_tests_sandbox_within_its_own_limit(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    pool = SandboxPool(1)
    [sandbox] = pool._sandboxes
    order: list[str] = []
    start, begin = Sandbox.start, Sandbox.begin

    def noted_start(self: Sandbox) -> Protections:
        order.append("start")
        return start(self)

    def noted_begin(self: Sandbox, program: Program, peer: int = -1) -> None:
        order.append("begin")
        begin(self, program, peer)

    if interrupted:  # as by the time limit of a sample
        sandbox.begin(HARMLESS)
    monkeypatch.setattr(Sandbox, "start", noted_start)
    monkeypatch.setattr(Sandbox, "begin", noted_begin)
    try:
        outcome = pool.run(asserts("def f(): return 1", "assert f() == 1"))
    finally:
        pool.close()
    assert (outcome.exit, order) == (0, ["start", "start", "begin", "begin"])
