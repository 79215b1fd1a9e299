"""Programs that do nothing wrong, in ways that walls and limits tend to break."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox.running import PATIENT, run

from roll_lite.sandbox.filesystem import PACKAGES
from roll_lite.sandbox.pool import Limits, Program, Sandbox

pytestmark = pytest.mark.usefixtures("works_after")
GENEROUS = replace(Limits(), cpu_s=30.0, wall_s=100.0)

PRINTS = {
    "output closed": """
import sys
print('said')
sys.stdout.close()
""",
    "output given up": """
import sys
print('said')
sys.stdout = None
print('lost')
""",
    "output replaced": """
import io, sys
sys.stdout = io.TextIOWrapper(open(1, 'wb', closefd=False))
print('said')
""",
    "output replaced and used": """
import io, sys
old = sys.stdout
sys.stdout = io.StringIO()
print('said')
old.write(sys.stdout.getvalue())
""",
    "at the end": """
import atexit
atexit.register(lambda: print('said'))
""",
    "when it goes": """
class Last:
    def __del__(self): print('said')
last = Last()
""",
    "a file of its own": "mine = open(1, 'w', closefd=False)\nmine.write('said' + chr(10))",
    "a module that it wrote": """
open('helper.py', 'w').write('word = "said"')
import helper
print(helper.word)
""",
    "32 threads": """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(32)]
for one in threads: one.start()
for one in threads: one.join()
print('said')
""",
    "40 threads": """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(40)]
for one in threads: one.start()
for one in threads: one.join()
print('said')
""",
    "a stack without a limit": """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (-1, -1))
resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print('said')
""",
    "memory and time without a limit": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_CPU, (9999, resource.RLIM_INFINITY))
print('said')
""",
    "names of an interactive interpreter": """
assert all(map(str, (copyright, credits, license, help, exit, quit)))
print('said')
exit()
""",
    "output detached": """
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')
print('said')
""",
    "output detached for bytes": """
import sys
out = sys.stdout.detach()
out.write(b'said' + bytes([10]))
""",
    "locks of a file": """
import fcntl
with open('x', 'w') as f:
    fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print('said')
""",
    "asked of a file": """
import array, fcntl, os, sys, termios
r, w = os.pipe()
os.write(w, b'123')
n = array.array('i', [0])
fcntl.ioctl(r, termios.FIONREAD, n)
os.set_blocking(r, False)
print('said' if n[0] == 3 and not os.isatty(r) and not sys.stdout.isatty() else '')
""",
    "a large stack": """
import sys, threading
threading.stack_size(512 << 20)
sys.setrecursionlimit(10**6)
def deep(n): return n and deep(n - 1)
thread = threading.Thread(target=deep, args=(10**5,))
thread.start(); thread.join(); print('said')
""",
    "threads in a pool": """
from concurrent.futures import ThreadPoolExecutor
print(list(ThreadPoolExecutor(30).map(str, ['said']))[0])
""",
    "a process of Python's": """
import subprocess, sys
print(subprocess.run([sys.executable, '-c', 'print("said")'], capture_output=True, text=True).stdout.strip())
""",
    "a time zone": """
import zoneinfo
print('said' if zoneinfo.ZoneInfo('Europe/Berlin') else '')
""",
    "a data base": """
import sqlite3
c = sqlite3.connect('x.db')
print(c.execute('select "said"').fetchone()[0])
""",
    "temporary files": """
import tempfile
with tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile('w+') as f:
    f.write('said'); f.seek(0); print(f.read())
""",
    "asyncio": """
import asyncio
async def main():
    await asyncio.sleep(0)
    print('said')
asyncio.run(main())
""",
    "a pipe between its processes": """
import os
r, w = os.pipe()
if os.fork() == 0:
    os.write(w, b'said'); os._exit(0)
os.wait(); print(os.read(r, 9).decode())
""",
    "a pair of sockets": """
import socket
a, b = socket.socketpair()
a.send(b'said'); print(b.recv(9).decode())
""",
    "a mapped file": """
import mmap
with open('x', 'w+b') as f:
    f.write(b'said'); f.flush()
    print(mmap.mmap(f.fileno(), 4)[:].decode())
""",
    "a signal to itself": """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print('said'))
os.kill(os.getpid(), signal.SIGUSR1)
""",
    "an alarm": """
import signal, time
signal.signal(signal.SIGALRM, lambda *_: print('said'))
signal.setitimer(signal.ITIMER_REAL, 0.05)
time.sleep(0.2)
""",
    "exit in a thread's shadow": """
import sys, threading
threading.Thread(target=lambda: print('said')).start()
sys.exit(0)
""",
}


@pytest.mark.parametrize("case", PRINTS)
def test_it_says_what_it_has_to(sandbox: Sandbox, case: str) -> None:
    outcome = run(sandbox, PRINTS[case], GENEROUS)
    assert (outcome.stdout, outcome.exit, outcome.stopped) == (b"said\n", 0, ""), outcome


PROCESSES = {
    "pool": """
from multiprocessing import Pool
def f(x): return x * x
with Pool(2) as pool: print(pool.map(f, [1, 2, 3]))
""",
    "executor": """
from concurrent.futures import ProcessPoolExecutor
def f(x): return x * x
with ProcessPoolExecutor(2) as pool: print(list(pool.map(f, [1, 2, 3])))
""",
    "queue": """
from multiprocessing import Process, Queue
q = Queue()
p = Process(target=q.put, args=([1, 4, 9],))
p.start(); print(q.get()); p.join()
""",
    "value": """
from multiprocessing import Process, Value
v = Value('i', 0)
def f():
    v.value = 9
p = Process(target=f)
p.start(); p.join(); print([1, 4, v.value])
""",
    "shared memory": """
from multiprocessing.shared_memory import SharedMemory
m = SharedMemory(create=True, size=3)
m.buf[:] = bytes([1, 4, 9])
print(list(m.buf[:3])); m.close(); m.unlink()
""",
    "lock": """
from multiprocessing import Lock, Process, Value
lock, value = Lock(), Value('i', 0, lock=False)
def f():
    for _ in range(300):
        with lock: value.value += 1
several = [Process(target=f) for _ in range(4)]
for one in several: one.start()
for one in several: one.join()
print([1, 4, 9] if value.value == 1200 else value.value)
""",
    "event and queue": """
from multiprocessing import Event, JoinableQueue, Process
event, queue, done = Event(), JoinableQueue(), JoinableQueue()
def f():
    event.wait()
    queue.get(); queue.task_done(); done.put([1, 4, 9])
p = Process(target=f)
p.start(); queue.put(1); event.set(); queue.join(); print(done.get()); p.join()
""",
    "locks by their rules": """
from multiprocessing import BoundedSemaphore, Lock, RLock
lock, bounded, own = Lock(), BoundedSemaphore(1), RLock()
lock.acquire()
late = lock.acquire(timeout=0.05), lock.acquire(False)
bounded.acquire(); bounded.release()
with own, own: pass
for release, error in ((bounded.release, ValueError), (own.release, AssertionError)):
    try: release()
    except error: late += (False,)
print([1, 4, 9] if late == (False,) * 4 else late)
""",
    "ended by its parent": """
import time
from multiprocessing import Process
p = Process(target=time.sleep, args=(50,))
p.start(); p.terminate(); p.join(); print([1, 4, 9] if p.exitcode == -15 else p.exitcode)
""",
    "pipe": """
from multiprocessing import Pipe, Process
here, there = Pipe()
p = Process(target=there.send, args=([1, 4, 9],))
p.start(); print(here.recv()); p.join()
""",
}


@pytest.mark.parametrize("case", PROCESSES)
def test_several_processes(sandbox: Sandbox, case: str) -> None:
    """They share locks in /dev/shm: behind mount namespaces each program has its own; elsewhere they are in files of its folder."""
    outcome = run(sandbox, PROCESSES[case], GENEROUS)
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
