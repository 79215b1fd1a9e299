"""Programs that attack: each fails, and the sandbox works after it. Where the platform lets them be built, for both kinds of walls."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandbox.running import LIMITS, PATIENT, SECRET, descendants, refused, run, said

from roll_lite.sandbox.pool import Limits, Program, Sandbox

pytestmark = pytest.mark.usefixtures("works_after")
COMPUTING = ("cpu", "wall")
"""On a machine that is busy otherwise the clock may be first."""


# ---------------------------------------------------------------- resources


def test_fork_bomb(sandbox: Sandbox) -> None:
    before = descendants()
    outcome = run(sandbox, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    assert outcome.stopped in ("cpu", "wall", "memory")
    assert descendants() == before


def test_processes_are_counted(sandbox: Sandbox) -> None:
    source = """
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0: time.sleep(9); os._exit(0)
        n += 1
except BlockingIOError: print('stopped at', n < 20)
"""
    assert said(sandbox, source) == "stopped at True\n"


def test_memory_bomb(sandbox: Sandbox) -> None:
    assert "MemoryError" in said(sandbox, "x = bytearray(2 << 30)")
    outcome = run(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert outcome.exit != 0 and outcome.cpu_s < 2


def test_memory_of_many_processes(sandbox: Sandbox) -> None:
    source = """
import os, time
for _ in range(8):
    if os.fork() == 0: break
x = bytearray(b'x') * (100 << 20)
time.sleep(12)
"""
    assert run(sandbox, source, Limits(cpu_s=8, wall_s=12, memory_mb=256, processes=16)).stopped == "memory"


def test_memory_of_children_of_threads(sandbox: Sandbox) -> None:
    source = """
import os, threading, time
def parent():
    for _ in range(8):
        if os.fork() == 0:
            x = bytearray(b'x') * (100 << 20)
            time.sleep(90)
            os._exit(0)
    time.sleep(90)
threading.Thread(target=parent).start()
time.sleep(90)
"""
    assert run(sandbox, source, replace(PATIENT, processes=24)).stopped == "memory"


FILL = """
import socket
kept, held = [], 0
try:
    while True: kept.extend(socket.socketpair())
except OSError: pass
for one in kept:
    one.setblocking(False)
    try:
        while True: held += one.send(bytes(1 << 15))
    except OSError: pass
"""


def test_memory_in_sockets(sandbox: Sandbox) -> None:
    """The memory of no process shows it."""
    refused(sandbox, "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)", "import socket")
    source = f"import os, time\nfor _ in range(4): os.fork()\n{FILL}\ntime.sleep(90)"
    assert run(sandbox, source, replace(PATIENT, memory_mb=128, processes=24)).stopped == "memory"


@pytest.mark.one_in(2)
def test_endless_loop_and_sleep(sandbox: Sandbox) -> None:
    assert run(sandbox, "while True: pass").stopped in COMPUTING
    started = time.monotonic()
    assert run(sandbox, "import time; time.sleep(60)").stopped == "wall"
    assert time.monotonic() - started < 40


@pytest.mark.one_in(2)
def test_computing_of_children_that_nobody_waits_for(sandbox: Sandbox) -> None:
    source = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.5: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
    assert run(sandbox, source, replace(PATIENT, cpu_s=2.0)).stopped == "cpu"


def test_catching_the_time_out(sandbox: Sandbox) -> None:
    source = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    assert run(sandbox, source).stopped in COMPUTING


def test_endless_output(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: print('y' * 1000)")
    assert (outcome.stopped == "output" or outcome.exit != 0) and len(outcome.stdout) <= LIMITS.output_kb * 1024
    outcome = run(sandbox, "import os\nwhile True:\n    try: os.write(2, b'y' * 65536)\n    except OSError: pass")
    assert outcome.stopped and len(outcome.stderr) <= LIMITS.output_kb * 1024


def test_large_files(sandbox: Sandbox) -> None:
    assert "File too large" in said(sandbox, "f = open('big', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()")


@pytest.mark.parametrize("count", [20, 10_000])
def test_many_files(sandbox: Sandbox, count: int) -> None:
    size = (20 << 20) // count
    source = f"import time\nfor i in range({count}): open(f'f{{i}}', 'wb').write(bytes({size}))\ntime.sleep(90)"
    outcome = run(sandbox, source, replace(PATIENT, folder_mb=8))
    assert outcome.stopped == "output" or b"No space left" in outcome.stderr, outcome


def test_huge_recursion(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "def f(n): return f(n + 1)\nf(0)")
    assert outcome.exit != 0
    outcome = run(sandbox, "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)")
    assert outcome.exit != 0
    nested = "def f():\n    x=[]\n    for _ in range(10**5): x=[x]\n    return x"
    call = {"kind": "calls", "source": nested, "function": "f", "calls": [{"t": [[], {"d": []}]}]}
    outcome = sandbox.run(Program(call | {"test_s": 9.0, "wall_s": 9.0, "most_bytes": 1 << 20}, limits=LIMITS))
    assert b"value" not in outcome.result


# ---------------------------------------------------------------- files


def test_reading_outside(sandbox: Sandbox, tmp: Path) -> None:
    secret = tmp / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    tmp.chmod(0o755)
    project = Path(__file__).resolve()
    for path in (secret, project, Path("/etc/passwd"), Path("/etc/shadow"), Path.home() / ".ssh", Path("/var/log")):
        refused(sandbox, f"open({str(path)!r}, 'rb').read()")
        refused(sandbox, f"os.listdir({str(path)!r})", "import os")


def test_writing_outside(sandbox: Sandbox, tmp: Path) -> None:
    tmp.chmod(0o777)
    for path in (tmp / "new", Path("/usr/lib/new"), Path("/new"), Path("/var/tmp/new"), Path.home() / "new"):
        refused(sandbox, f"open({str(path)!r}, 'w').write('x')")
        assert not path.exists()
    interpreter = said(sandbox, "import os; print(os.__file__)").strip()
    refused(sandbox, f"open({interpreter!r}, 'a').write('x')")


def test_the_folder_is_empty_and_goes(sandbox: Sandbox) -> None:
    assert said(sandbox, "import os; open('left', 'w').write('x'); print(os.listdir('.'))") == "['left']\n"
    assert said(sandbox, "import os; print(os.listdir('.'))") == "[]\n"
    assert not Path("/tmp/left").exists()


def test_symlinks_and_archives(sandbox: Sandbox, tmp: Path) -> None:
    secret = tmp / "secret"
    secret.write_text(SECRET)
    tmp.chmod(0o777)
    refused(sandbox, "open('link').read()", f"import os; os.symlink({str(secret)!r}, 'link')")
    refused(sandbox, f"os.link({str(secret)!r}, 'hard')", "import os")
    traversal = f"""
import io, tarfile
archive = tarfile.open('a.tar', 'w')
inside = tarfile.TarInfo('../../../../{tmp}/planted'); inside.size = 1
archive.addfile(inside, io.BytesIO(b'x')); archive.close()
"""
    run(sandbox, f"{traversal}\ntarfile.open('a.tar').extractall('.')")  # under the namespaces' own /tmp it may even succeed
    assert not (tmp / "planted").exists()


def test_leaving_the_root(sandbox: Sandbox) -> None:
    refused(sandbox, "os.chroot('.')", "import os")
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('m', exist_ok=True)
print([libc.mount(b'none', b'm', b'tmpfs', 0, None), libc.unshare(0x10000000), libc.unshare(0x20000), libc.umount2(b'/tmp', 2),
       libc.umount2(b'/proc', 2), libc.ptrace(16, 1, 0, 0), libc.syscall(435, 0, 0), libc.setns(0, 0)])
"""
    assert said(sandbox, source) == f"{[-1] * 8}\n"


# ---------------------------------------------------------------- secrets, network, other processes


def test_environment(sandbox: Sandbox) -> None:
    out = said(sandbox, "import os; print(sorted(os.environ)); print(os.popen('env').read())")
    assert SECRET not in out and "ROLL" not in out and out.startswith("['HOME', 'LANG', 'PATH', 'TMPDIR']")


def test_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused(sandbox, f"socket.create_connection(('127.0.0.1', {port}), 0.3)", "import socket")
        refused(sandbox, "socket.create_connection(('1.1.1.1', 53), 0.3)", "import socket")
        refused(sandbox, "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))", "import socket")
        refused(sandbox, "socket.socket(socket.AF_UNIX).connect(chr(0) + 'x')", "import socket")
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_processes_are_hidden(sandbox: Sandbox) -> None:
    source = """
import os
try: print([name for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()])
except OSError: print([])
"""
    assert said(sandbox, source) == "[]\n"


def test_proc_walk(sandbox: Sandbox) -> None:
    source = f"""
import os
found = []
for pid in [*range(1, 200), {os.getpid()}, {os.getppid()}]:
    for name in ('environ', 'cmdline', 'mem', 'cwd/secret', 'root/etc/passwd'):
        if pid == os.getpid(): continue
        try: found.append(open(f'/proc/{{pid}}/{{name}}', 'rb').read(100))
        except OSError: pass
for name in ('/proc/self/environ', '/proc/self/cmdline', '/proc/1/environ'):
    try: found.append(open(name, 'rb').read())
    except OSError: pass
print(found)
"""
    out = said(sandbox, source)
    assert SECRET not in out and "root:" not in out and "ROLL_TEST" not in out
    for path in ("/proc/self/root/etc/passwd", "/proc/1/root/etc/shadow", "/proc/sysrq-trigger", "/proc/kcore"):
        refused(sandbox, f"open({path!r}, 'rb').read(10)")


def test_killing_and_tracing(sandbox: Sandbox) -> None:
    assert sandbox._process is not None
    pids = [os.getpid(), sandbox._process.pid, *(child.pid for child in psutil.Process(sandbox._process.pid).children()), -1]
    source = f"""
import os, signal, ctypes
libc = ctypes.CDLL(None, use_errno=True)
done = []
for pid in {pids} + [os.getppid()] * (os.getppid() > 0):
    if pid == os.getpid(): continue
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        try:
            os.kill(pid, number)
            if pid != -1: done.append(pid)
        except OSError: pass
    if pid > 0 and libc.ptrace(16, pid, 0, 0) == 0: done.append('traced')
print(done)
"""
    assert said(sandbox, source) == "[]\n"
    assert psutil.Process(sandbox._process.pid).status() != psutil.STATUS_STOPPED


def test_limits_of_others_are_out_of_reach(sandbox: Sandbox) -> None:
    refused(sandbox, f"resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1))", "import resource")
    source = """
import resource
for which in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_DATA):
    before = resource.getrlimit(which)
    if before[1] > 0: resource.setrlimit(which, (before[1] + 999, before[1] + 999))
    assert resource.getrlimit(which) == before
try: resource.prlimit(0, resource.RLIMIT_CPU, (999, 999)); print('did')
except (ValueError, OSError): print('refused')
"""
    assert said(sandbox, source) == "refused\n"


@pytest.mark.one_in(2)
def test_processes_of_the_same_user_elsewhere_take_none_of_a_programs_own(sandbox: Sandbox) -> None:
    """A limit of processes counts the user's everywhere: a second sandbox may be full without the first one's programs noticing."""
    many = "import os, time\nfor _ in range(14):\n    if os.fork() == 0: break\ntime.sleep(3)"
    neighbour = Sandbox(str(sandbox._settings["walls"]))
    try:
        neighbour.start()
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(run, neighbour, many, replace(LIMITS, wall_s=8.0))
            time.sleep(1)
            assert said(sandbox, "import os\nif os.fork(): os.wait(); print('forked')") == "forked\n"
            busy.result()
    finally:
        neighbour.close()


def test_folders_nested_more_deeply_than_python_recurses(sandbox: Sandbox, tmp: Path) -> None:
    source = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nprint('deep')"
    outcome = run(sandbox, source, PATIENT)
    assert outcome.stdout == b"deep\n" or outcome.stopped == "output", outcome
    assert not list(tmp.rglob("d"))


def test_daemons_die(sandbox: Sandbox, tmp: Path) -> None:
    before = descendants()
    source = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
print('gone')
"""
    assert said(sandbox, source) == "gone\n"
    assert descendants() == before
