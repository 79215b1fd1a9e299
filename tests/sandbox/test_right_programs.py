"""Programs that do nothing wrong, in ways that walls and limits tend to break. Each of right_programs.jsonl prints `said`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox.running import PATIENT, run
from support_cases import cases

from roll_lite.sandbox.filesystem import PACKAGES
from roll_lite.sandbox.pool import Limits, Program, Sandbox

pytestmark = pytest.mark.usefixtures("works_after")
GENEROUS = replace(Limits(), cpu_s=30.0, wall_s=100.0)


@pytest.mark.parametrize("program", cases("sandbox/right_programs"))
def test_it_says_what_it_has_to(sandbox: Sandbox, program: str) -> None:
    outcome = run(sandbox, program, GENEROUS)
    assert (outcome.stdout, outcome.exit, outcome.stopped) == (b"said\n", 0, ""), outcome


@pytest.mark.parametrize("program", cases("sandbox/several_processes"))
def test_several_processes(sandbox: Sandbox, program: str) -> None:
    """Locks of multiprocessing need /dev/shm: behind mount namespaces each program has its own; with landlock alone none has it."""
    if sandbox.protections is None or sandbox.protections.kind == "landlock":
        pytest.skip("no /dev/shm")
    outcome = run(sandbox, program, GENEROUS)
    assert (outcome.stdout, outcome.exit) == (b"[1, 4, 9]\n", 0), outcome
    look = "import os\ntry: print(os.listdir('/dev/shm'))\nexcept PermissionError: print([])"
    assert run(sandbox, look, GENEROUS).stdout == b"[]\n", "nothing of the one before"


def test_no_shared_memory_of_the_machine(sandbox: Sandbox) -> None:
    name = "/dev/shm/roll-lite-attack"
    run(sandbox, f"open({name!r}, 'w').write('x')", GENEROUS)
    assert not Path(name).exists()


@pytest.mark.skipif(shutil.which("node") is None, reason="takes node")
@pytest.mark.parametrize("megabytes", [1, 400])
def test_node_has_the_memory_that_it_was_given(sandbox: Sandbox, megabytes: int) -> None:
    text = f"const kept = []; for (let i = 0; i < {megabytes}; i++) kept.push(Buffer.alloc(1 << 20, 1)); console.log('said')"
    program = Program({"kind": "exec", "files": {"main.js": text}, "command": ["node", "main.js"]}, address_space=False, limits=GENEROUS)
    outcome = sandbox.run(program)
    assert (outcome.stdout, outcome.exit) == (b"said\n", 0), outcome


def test_nobody_has_more_memory_than_it_was_given(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "import time\nx = bytearray(b'x') * (400 << 20)\ntime.sleep(60)", replace(PATIENT, memory_mb=256))
    assert outcome.stopped == "memory", outcome


HIDDEN = (
    "/usr/src",
    "/usr/games",
    "/usr/share/doc",
    "/usr/local/src",
    "/usr/local/share",
    "/usr/local/etc",
    "/opt",
    "/srv",
    "/home",
    "/var",
)


def test_what_no_program_needs_is_hidden(sandbox: Sandbox) -> None:
    """Answers that were held out may lie there."""
    packages = [f"{Path(os.__file__).parent}/{name}/README.txt" for name in PACKAGES]
    source = f"""
import os
seen = []
for path in {HIDDEN}:
    try: seen.append((path, os.listdir(path)[:3]))
    except OSError: pass
for path in {packages}:
    try: seen.append((path, open(path).read(9)))
    except OSError: pass
print(seen)
"""
    assert run(sandbox, source, GENEROUS).stdout == b"[]\n"


@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
@pytest.mark.parametrize("inner", ["", "/pip"])
def test_installed_packages_are_shown_where_they_are_asked_for(kind: str, inner: str) -> None:
    folder = f"{Path(os.__file__).resolve().parent}/site-packages"
    if not Path(f"{folder}/pip").is_dir():
        pytest.skip("no package beside this interpreter")
    sandbox = Sandbox(kind, readable=[f"{folder}{inner}"])
    try:
        if sandbox.start().kind != kind:
            pytest.skip("not on this platform")
        assert run(sandbox, f"print(len(open('{folder}/pip/__init__.py').read()) > 0)", GENEROUS).stdout == b"True\n"
    finally:
        sandbox.close()
