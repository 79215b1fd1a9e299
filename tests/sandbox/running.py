"""Programs in a sandbox, and what they say of themselves."""

from __future__ import annotations

from dataclasses import replace

import psutil

from roll_lite.sandbox.pool import Limits, Outcome, Pair, Program, Sandbox

LIMITS = Limits(cpu_s=0.5, wall_s=3.0, memory_mb=256, output_kb=64, file_mb=4, folder_mb=8, processes=16)
PATIENT = replace(LIMITS, cpu_s=30.0, wall_s=100.0)
SECRET = "swordfish-3141"
"""In the environment of the trusted side."""


def run(sandbox: Sandbox, source: str, limits: Limits = LIMITS) -> Outcome:
    return sandbox.run(Program({"kind": "script", "source": source}, limits=limits))


def said(sandbox: Sandbox, source: str) -> str:
    """What it printed, its errors told apart."""
    outcome = run(sandbox, source, replace(LIMITS, cpu_s=3.0, wall_s=100.0))
    assert outcome.stopped == "", outcome
    return (outcome.stdout + outcome.stderr).decode()


def descendants() -> int:
    """Of all sandboxes of this process."""
    return len(psutil.Process().children(recursive=True))


def refused(sandbox: Sandbox, statement: str, preparation: str = "") -> None:
    source = (
        f"{preparation}\ntry:\n    print('did', {statement})\nexcept (OSError, ModuleNotFoundError) as error:\n    print('refused', error)"
    )
    out = said(sandbox, source)
    assert out.startswith("refused"), out


def asserts(source: str, tests: str) -> Pair:
    """The program and its tests, as the reward sends them."""
    test = {"source": tests, "names": ["f"], "modules": {}, "imports": [], "inside": ""}
    program = {"kind": "serve", "source": source, "names": ["f"], "test_s": PATIENT.cpu_s, "modules": {}, "imports": []}
    order = {"kind": "tests", "tests": [test], "wall_s": PATIENT.wall_s, "fail_fast": True}
    return Pair(Program(program, limits=PATIENT), Program(order, limits=PATIENT))
