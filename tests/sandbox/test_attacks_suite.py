"""Programs that attack, in one line each: what they try, and what it must not achieve. `test_right_programs.py` holds what must work."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandbox.running import LIMITS, PATIENT, SECRET, descendants, run

from roll_lite.sandbox.pool import Program, Sandbox

pytestmark = pytest.mark.usefixtures("works_after")
QUICK = replace(LIMITS, cpu_s=0.5, wall_s=1.2)
LIBC = """
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers): return libc.syscall(*[ctypes.c_long(one) if isinstance(one, int) else one for one in numbers])
"""

REFUSED = {
    # Files
    "a hard link to a file of the system": "os.link('/usr/bin/env', 'env')",
    "a path through /proc to the old root": "os.listdir('/proc/1/root/home')",
    "a path through an open folder": "os.open('../../../etc/passwd', os.O_RDONLY, dir_fd=os.open('.', os.O_RDONLY))",
    "a path above the root": "open('/..' * 30 + '/etc/passwd').read()",
    "a device": "os.mknod('disk', 0o60666, os.makedev(8, 0))",
    "the interpreter's own file": "open(sys.executable, 'r+b')",
    "a library, opened for writing through /proc": "os.open('/proc/self/exe', os.O_RDWR)",
    "an overlay of the interpreter": "os.rename('x', '/usr/bin/python3')",
    "the folders of other sandboxes": "[os.listdir(f'{d}/{n}') for d in ('/tmp', '/var/tmp') for n in os.listdir(d) if "
    "n.startswith('code-')][0]",
    "the source of the sandbox": f"open({str(Path(__file__).parents[2] / 'roll_lite' / 'sandbox' / 'zygote.py')!r}).read()",
    "the tests": f"open({__file__!r}).read()",
    "the user's home": "os.listdir(os.path.expanduser('~root/.ssh'))",
    "mounts of the machine, written": "os.write(os.open('/proc/sys/fs/mount-max', os.O_WRONLY), b'1')",
    "a core pattern": "os.write(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY), b'|/x')",
    "the next one's interpreter, by its memory": "os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)",
    "attributes of files of the system": "os.setxattr('/usr/bin/env', 'user.x', b'y')",
    "times of files of the system": "os.utime('/usr/bin/env', (0, 0))",
    "a larger file than allowed, without writing it": "os.truncate('x', 1 << 40)",
    "a larger output than allowed, without writing it": "os.ftruncate(1, 1 << 40)",
    "room in a file, without writing it": "os.posix_fallocate(os.open('x', os.O_RDWR | os.O_CREAT), 0, 1 << 40)",
    # Processes
    "the other user": "os.setuid(0)",
    "another group": "os.setgroups([0])",
    "a better priority": "os.nice(-5)",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
    "a higher limit of files": "resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))",
    "a higher limit of processes": "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
    "a core file": "resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))",
    "a crash for the machine's handler": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "locked memory": "mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x2000)",
    "the parent, by a file of it": "os.pidfd_open(os.getppid() or 999999)",
    "to be spared when memory ends": "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
    "the machine's name": "socket.sethostname('mine')",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "a namespace": "os.unshare(0x10000000) if hasattr(os, 'unshare') else call(272, 0x10000000) >= 0 or open('/nowhere')",
    # Sockets
    "a server": "socket.create_server(('127.0.0.1', 0))",
    "a name": "socket.getaddrinfo('example.com', 80)[0]",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a packet socket": "socket.socket(17, socket.SOCK_RAW, 0)",
    "the daemon of containers": "socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
    "a socket for messages, from a file": "socket.fromfd(0, socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '/tmp/x')",
}


@pytest.mark.parametrize("attempt", REFUSED)
def test_refused(sandbox: Sandbox, attempt: str) -> None:
    source = (
        f"{LIBC}\nopen('x', 'w').close()\ntry:\n    {REFUSED[attempt]}\n    print('did')\nexcept (OSError, ValueError): print('refused')"
    )
    outcome = run(sandbox, source, PATIENT)
    assert (outcome.stdout, outcome.stopped) == (b"refused\n", ""), outcome


CALLS = {
    "splice pages into a pipe": (278, 1, 0, 0, 8),
    "asynchronous I/O": (206, 64, 4096),
    "hide from who looks": (157, 4, 0, 0, 0, 0),
    "look into the parent": (310, 1, 0, 0, 0, 0, 0),
    "a user's keys": (250, 0, -3, 1, 0, 0),
    "a watch on the system's folders": (301, 0, 0, 0, 0, 0),
    "performance counters": (298, 0, 0, -1, -1, 0),
    "an old binary's number": (1073741863,),
    "a new root": (161, 0),
    "modules": (175, 0, 0, 0),
    "quota": (179, 0, 0, 0, 0),
    "an ioctl for ports": (173, 0, 3, 1),
    "ports": (172, 3),
    "a file by its handle": (304, -1, 0, 0),
    "another kernel": (246, 0, 0, 0, 0),
    "rules in the kernel's memory": (444, 0, 0, 1),
    "filters in the kernel's memory": (317, 1, 0, 0),
    "filters by another call": (157, 22, 2, 0, 0, 0),
    "a lower limit of core files": (160, 4, b"\0" * 16),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are of x86_64")
@pytest.mark.parametrize("call", CALLS)
def test_system_calls(sandbox: Sandbox, call: str) -> None:
    outcome = run(sandbox, f"{LIBC}\nprint(call(*{CALLS[call]}) < 0)", PATIENT)
    assert outcome.stdout == b"True\n" or outcome.exit < 0, outcome


ENDLESS = {
    "threads that compute": "for _ in range(8): threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
    "a loop in C": "sum(range(10**12))",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "a large power": "x = 7 ** 10 ** 9",
    "an exit that never comes": "import atexit\natexit.register(lambda: time.sleep(900))",
    "an object that will not go": "class A:\n    def __del__(self):\n        while True: pass\na = A()",
    "a thread that nobody ends": "threading.Thread(target=time.sleep, args=(900,)).start()",
    "a stopped child": "p = os.fork()\nif p == 0: os.kill(os.getpid(), signal.SIGSTOP)\nos.waitpid(p, 0)",
    "a flood of signals": "signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
    "while True: time.sleep(9)",
    "a pipe full of nothing": "os.write(os.pipe()[1], bytes(1 << 20))",
    "a daemon without parents": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\n    os._exit(0)\n"
    "time.sleep(900)",
    "names without end": "while True:\n    try: os.rename('x', 'y'); os.rename('y', 'x')\n    except OSError: open('x', 'w').close()",
    "a fork that forks": "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
    "limits that are waited for": "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", ENDLESS)
def test_it_ends_and_leaves_nothing(sandbox: Sandbox, program: str) -> None:
    before, started = descendants(), time.monotonic()
    outcome = run(sandbox, f"{LIBC}\n{ENDLESS[program]}", QUICK)
    assert outcome.stopped in ("cpu", "wall", "memory", "processes") or outcome.exit != 0, outcome
    assert time.monotonic() - started < 60 and descendants() == before


TOO_MUCH = {
    "text": "x = 'y' * (1 << 31)",
    "a list that doubles": "x = [0]\nwhile True: x += x",
    "children with memory": "for _ in range(6):\n    if os.fork() == 0: break\nx = bytearray(b'x') * (90 << 20)\ntime.sleep(60)",
    "a sparse file, read": "os.truncate('x', 3 << 20)\nx = [open('x', 'rb').read() for _ in range(400)]",
    "threads with stacks": "threading.stack_size(64 << 20)\n"
    "for _ in range(30): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "parts of an archive": "import zlib\nx = zlib.decompress(zlib.compress(bytes(200 << 20)) , bufsize=1 << 30) * 9",
}


@pytest.mark.parametrize("program", TOO_MUCH)
def test_it_takes_no_more_than_it_was_given(sandbox: Sandbox, program: str) -> None:
    available = psutil.virtual_memory().available
    outcome = run(sandbox, f"{LIBC}\nopen('x', 'w').close()\n{TOO_MUCH[program]}", replace(PATIENT, wall_s=10.0))
    assert outcome.stopped == "memory" or outcome.exit != 0, outcome
    assert available - psutil.virtual_memory().available < 2 << 30


FILES = {
    "standard input as a place": "os.ftruncate(0, 0)\nwhile True: os.write(0, bytes(1 << 20))",
    "folders": "while True: os.makedirs('a/' * 9); os.rename('a', str(time.time_ns()))",
    "links": "n = 0\nwhile True: os.symlink('y' * 4000, str(n)); n += 1",
    "attributes": "n = 0\nwhile True: os.setxattr('x', f'user.{n}', bytes(4000)); n += 1",
    "files without a name": "x = []\nwhile True: x.append(os.open('.', os.O_TMPFILE | os.O_RDWR)); os.write(x[-1], bytes(1 << 20))",
    "a result without end": "while True: os.write(3, bytes(1 << 16))",
    "errors without end": "while True: sys.stderr.write('x' * 65536)",
}


@pytest.mark.parametrize("program", FILES)
def test_it_writes_no_more_than_it_was_given(sandbox: Sandbox, program: str) -> None:
    disk = psutil.disk_usage("/tmp").free
    outcome = run(sandbox, f"{LIBC}\nopen('x', 'w').close()\n{FILES[program]}", QUICK)
    assert outcome.stopped or outcome.exit != 0, outcome
    assert max(len(outcome.stdout), len(outcome.stderr), len(outcome.result)) <= QUICK.output_kb * 1024
    assert disk - psutil.disk_usage("/tmp").free < 512 << 20


SECRETS = {
    "its environment": "print(open('/proc/self/environ').read(), dict(os.environ))",
    "its command line": "print(open('/proc/self/cmdline').read())",
    "those of all others": "for p in os.listdir('/proc'):\n    if p.isdigit():\n        try: print(open(f'/proc/{p}/environ').read())\n"
    "        except OSError: pass",
    "objects in its memory": "import gc\nprint([o for o in gc.get_objects() if isinstance(o, (dict, list, str))])",
    "frames above it": "f = sys._getframe()\nwhile f:\n    print(list(f.f_locals.items())); f = f.f_back",
}


@pytest.mark.parametrize("place", SECRETS)
def test_no_secret_of_the_trusted_side(sandbox: Sandbox, place: str) -> None:
    source = f"{LIBC}\ntry:\n    " + SECRETS[place].replace("\n", "\n    ") + "\nexcept OSError: pass"
    outcome = run(sandbox, source, replace(PATIENT, output_kb=8192))
    assert SECRET.encode() not in outcome.stdout and b"ROLL_TEST" not in outcome.stdout
    assert outcome.stopped == "", outcome


LEFT = {
    "a variable of the environment": ("os.environ['LEFT'] = 'left'", "os.environ.get('LEFT')"),
    "a patched module": ("import json; json.left = 'left'", "getattr(__import__('json'), 'left', None)"),
    "a file": ("open('left', 'w').write('left')", "os.path.exists('left') or None"),
    "a file in /tmp": ("open('/tmp/left', 'w').write('left') if os.access('/tmp', os.W_OK) else 0", "os.path.exists('/tmp/left') or None"),
    "a file in /dev/shm": ("open('/dev/shm/left', 'w').write('left')", "os.path.exists('/dev/shm/left') or None"),
    "a mask of files": ("os.umask(0o777)", "None if os.umask(0o22) != 0o777 else 'left'"),
    "an ignored signal": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "None if signal.getsignal(signal.SIGTERM) == 0 else 'left'"),
    "a lower limit": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))",
        "None if resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 9 else 1",
    ),
    "a seed": ("import random; random.seed(5)", "None if __import__('random').random() != 0.6229016948897019 else 'left'"),
    "a priority": ("os.nice(5)", "None if os.getpriority(os.PRIO_PROCESS, 0) < 5 + PRIORITY else 'left'"),
    "an abstract socket": ("s = socket.socketpair()[0]; s.bind(chr(0) + 'left')", "None"),
    "a processor": ("os.sched_setaffinity(0, [0])", "None if len(os.sched_getaffinity(0)) == PROCESSORS else 'left'"),
}


@pytest.mark.parametrize("what", LEFT)
def test_the_next_program_finds_nothing(sandbox: Sandbox, what: str) -> None:
    known = f"PRIORITY, PROCESSORS = {os.nice(0)}, {len(os.sched_getaffinity(0))}"
    leave, look = LEFT[what]
    run(sandbox, f"{LIBC}\n{known}\n{leave}", PATIENT)
    assert run(sandbox, f"{LIBC}\n{known}\nprint({look})", PATIENT).stdout == b"None\n"


EXEC = {
    "a shell that forks": (["sh", "-c", "f() { f | f & }; f; sleep 60"], {}),
    "a shell that writes": (["sh", "-c", "yes > big; yes >> big"], {}),
    "a shell that reads": (["sh", "-c", "cat /etc/shadow /etc/passwd /root/.ssh/* && true"], {}),
    "a set-user program": (["sh", "-c", "su -c id || mount -t tmpfs x /tmp || passwd -d root"], {}),
}


@pytest.mark.parametrize("program", EXEC)
def test_programs_of_the_system(sandbox: Sandbox, program: str) -> None:
    command, files = EXEC[program]
    before = descendants()
    outcome = sandbox.run(Program({"kind": "exec", "files": files, "command": command}, limits=QUICK))
    assert (outcome.stopped or outcome.exit != 0) and b"root:" not in outcome.stdout and b"uid=0" not in outcome.stdout, outcome
    assert descendants() == before
