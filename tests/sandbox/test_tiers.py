"""On platforms that give less: a sandbox either works, with weaker walls, or says what is missing and is refused."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from roll_lite.sandbox import isolation
from roll_lite.sandbox.pool import Protections

ROOT = Path(__file__).resolve().parents[2]
TRY = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    from roll_lite.sandbox.pool import Limits, Program, SandboxPool
    pool = SandboxPool(1, walls=sys.argv[1])
    daemon = "import os, time\\nif os.fork() == 0:\\n    os.setsid(); os.mkdir('d', 0o700); time.sleep(500)\\n"
    try:
        pool.start()
    except ValueError as refusal:
        print("refused", refusal)
    else:
        outcome = pool.run(Program({{"kind": "script", "source": daemon + "print('ran')"}}, limits=Limits(cpu_s=30, wall_s=100)))
        print(pool._sandboxes[0].protections.kind, outcome.stdout.decode(), outcome.stderr.decode(), outcome.stopped)
    finally:
        pool.close()
"""
IN_A_CONTAINER = """
    import ctypes, os, sys
    mapped, command = sys.argv[1], sys.argv[2:]
    (here, there), (back, forth) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        assert ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0
        os.write(there, b"x"), os.read(back, 1)
        os.setresgid(0, 0, 0), os.setresuid(0, 0, 0)
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        os.execv(command[0], command)
    os.read(here, 1)
    for name in ("uid_map", "gid_map"):
        open(f"/proc/{pid}/{name}", "w").write(f"0 0 {mapped}")
    os.write(forth, b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
FEWER = [
    "-all",
    "-sys_admin",
    "-setuid",
    "-sys_admin,-setuid",
    "-sys_admin,-kill",
    "-sys_admin,-chown",
    "-sys_admin,-dac_override",
    "-setpcap",
]

root_only = pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="takes root and setpriv")


def tried(kind: str, *around: str, python: str = sys.executable) -> str:
    command = [*around, python, "-c", textwrap.dedent(TRY), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@root_only
@pytest.mark.parametrize("capabilities", FEWER)
def test_root_with_fewer_capabilities(capabilities: str) -> None:
    said = tried("namespaces", "setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}")
    assert said in ("namespaces ran", "landlock ran") or said.startswith("refused reward code: this machine cannot isolate programs"), said
    if capabilities in ("-all", "-setuid"):
        assert "missing: processes" in said


@root_only
@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_root_of_a_container_without_user_namespaces(kind: str) -> None:
    around = (sys.executable, "-c", textwrap.dedent(IN_A_CONTAINER))
    said = tried(kind, *around, "65536")
    assert said == f"{kind} ran" or said.startswith("refused"), said
    assert tried(kind, *around, "1").startswith("refused"), "nobody else's user is there"


@functools.cache
def as_a_user() -> tuple[str, list[str]] | None:
    """An interpreter that an ordinary user may read, and the command that makes one."""
    change = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
    for python in (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"):
        able = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); import roll_lite; assert os.access({python!r}, os.X_OK)"
        right = f"{able} and sys.version_info >= (3, 11)"
        if Path(python).exists() and subprocess.run([*change, python, "-c", right], capture_output=True, check=False).returncode == 0:
            return python, change
    return None


@root_only
@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_an_ordinary_user(kind: str) -> None:
    found = as_a_user()
    if found is None:
        pytest.skip("no interpreter and checkout that an ordinary user may read")
    python, change = found
    said = tried(kind, *change, python=python)
    assert said in (f"{kind} ran", "landlock ran") or said.startswith("refused"), said


MANY = f"""
    import collections, sys
    sys.path.insert(0, {str(ROOT)!r})
    from roll_lite.sandbox.pool import Limits, Program, Sandbox
    sandbox, ended = Sandbox("landlock"), collections.Counter()
    sandbox.start()
    short = "import os, time\\ntime.sleep(%f)\\nfor _ in range(5):\\n    if os.fork() == 0: os._exit(0)"
    for number in range(60):
        program = Program({{"kind": "script", "source": short % (number % 30 / 1000)}}, limits=Limits(cpu_s=30, wall_s=100))
        ended[sandbox.run(program).stopped] += 1
    sandbox.close()
    print(dict(ended))
"""


@root_only
def test_processes_that_are_about_to_end_hide_nothing() -> None:
    """An ordinary user cannot look into them any more."""
    found = as_a_user()
    if found is None:
        pytest.skip("no interpreter and checkout that an ordinary user may read")
    python, change = found
    done = subprocess.run([*change, python, "-c", textwrap.dedent(MANY)], capture_output=True, text=True, check=True, timeout=250)
    assert done.stdout.strip() == "{'': 60}"


@pytest.mark.parametrize(
    ("abi", "filtered", "machine_root", "other_user", "holds"),
    [
        (7, True, False, False, True),
        (5, True, False, False, False),
        (5, True, True, True, True),
        (7, True, True, False, False),
        (7, False, True, True, False),
        (0, True, True, True, False),
    ],
)
def test_without_a_pid_namespace_processes_are_safe_only_where_signals_stay_inside(
    abi: int, filtered: bool, machine_root: bool, other_user: bool, holds: bool
) -> None:
    assert (isolation._open_to_others(abi, filtered, machine_root, other_user) == "") == holds


def test_what_is_missing_is_told_and_refused() -> None:
    protections = Protections("landlock", {"files": "landlock", "network": "seccomp"}, ("processes: signals pass",))
    with pytest.raises(ValueError, match=r"missing: processes .*\[processes: signals pass\].* allow_unprotected: true"):
        protections.refuse_missing(allowed=False)
    protections.refuse_missing(allowed=True)
