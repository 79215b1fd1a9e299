"""Programs that turn to the kernel's rarer services, and to what an ordinary user's other files and processes let them do."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandbox.running import PATIENT, run, said

from roll_lite.rewards.code.languages import LANGUAGES
from roll_lite.sandbox.pool import Program, Sandbox

pytestmark = pytest.mark.usefixtures("works_after")

CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
four, pair = (ctypes.c_int * 4)(), (ctypes.c_int * 2)()
shown, folder, own = os.open("/usr/bin/env", os.O_RDONLY), os.open(".", os.O_RDONLY), os.open("own", os.O_RDWR | os.O_CREAT)
tries = {
    "inotify": (254, 0, b"/usr", 0xFFF), "memfd": (319, b"x", 0), "memfd_secret": (447, 0), "clone user": (56, 0x10000011, 0, 0, 0, 0),
    "unshare": (272, 0x10000000), "clone3": (435, 0, 0), "trace me": (101, 0, 0, 0, 0), "key": (248, b"user", b"x", b"y", 1, -3),
    "keyctl": (250, 0, -3, 1), "io_uring": (425, 8, four), "bpf": (321, 0, four, 16), "perf": (298, four, 0, -1, -1, 0),
    "userfaultfd": (323, 0), "shmget": (29, 0, 4096, 0o1600), "semget": (64, 0, 1, 0o1600), "msgget": (68, 0, 0o1600),
    "mq_open": (240, b"x", 0o102, 0o600, 0), "handle": (303, -100, b"/tmp", four, four, 0), "device": (133, b"n", 0o20666, 0x103),
    "personality": (135, 0x0040000), "syslog": (103, 3, four, 4), "setuid": (105, 0), "fanotify": (300, 0, 0), "mlockall": (151, 3),
    "packets": (53, 17, 3, 0, pair), "netlink": (53, 16, 3, 0, pair), "vsock": (53, 40, 1, 0, pair), "pidfd": (424, 0, 9, 0, 0),
    "shmat": (30, SHARED, 0, 0), "shmctl": (31, SHARED, 2, four), "shm remove": (31, SHARED, 0, 0), "semop": (65, SEMAPHORE, four, 1),
    "semctl": (66, SEMAPHORE, 0, 12), "semtimedop": (220, SEMAPHORE, four, 1, 0), "msgsnd": (69, QUEUE, (ctypes.c_long * 2)(1), 0, 0o4000),
    "msgrcv": (70, QUEUE, (ctypes.c_long * 2)(), 8, 0, 0o4000), "msgctl": (71, QUEUE, 0, 0), "mq_unlink": (241, b"roll-lite-test"),
    "lease": (72, own, 1024, 0), "notify": (72, folder, 1026, 1), "owner of signals": (72, own, 8, os.getpid()), "signal": (72, own, 10, 9),
    "flock": (73, shown, 2), "flock shared": (73, shown, 1), "flags": (16, own, 0x40086602, four), "version": (16, own, 0x40087602, four),
    "attributes": (16, own, 0x401C5820, (ctypes.c_int * 8)()), "freeze": (16, own, 0xC0045877, 0), "sync": (162,), "syncfs": (306, own),
    "move pages": (279, 0, 0, 0, 0, 0, 0), "migrate pages": (256, 0, 8, four, four), "release": (448, 9, 0),
    **{f"socket {family}": (41, family, 3, 0) for family in (1, 2, 10, 15, 16, 17, 38, 40)},
}
print([name for name, call in tries.items() if libc.syscall(*call) >= 0])
"""


class SystemV:
    """Shared memory, a semaphore and a queue with a message, of the user as whom the programs run."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.shared = self._libc.shmget(0, 4096, 0o1666)
        self.semaphore = self._libc.semget(0, 1, 0o1666)
        self.queue = self._libc.msgget(0, 0o1666)
        assert self._libc.msgsnd(self.queue, (ctypes.c_long * 2)(1, 7), 8, 0o4000) == 0

    def close(self) -> bool:
        """Remove them; False where one is gone or has changed."""
        received = self._libc.msgrcv(self.queue, (ctypes.c_long * 2)(), 8, 0, 0o4000)
        ended = [self._libc.shmctl(self.shared, 0, None), self._libc.semctl(self.semaphore, 0, 0), self._libc.msgctl(self.queue, 0, None)]
        return ended == [0, 0, 0] and received == 8


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are of x86_64")
def test_rarer_services_of_the_kernel(sandbox: Sandbox) -> None:
    """Objects of System V are found by their numbers, which are counted: without an IPC namespace they are those of the machine."""
    machines = SystemV()
    known = f"SHARED, SEMAPHORE, QUEUE = {machines.shared}, {machines.semaphore}, {machines.queue}\n"
    said_of_calls = said(sandbox, known + CALLS)
    assert machines.close() and said_of_calls == "[]\n"


def test_files_have_no_room_before_they_are_written(sandbox: Sandbox) -> None:
    """Without a mount namespace its folder is on the machine's disk, which a program could fill between two looks."""
    source = """
import os
kept = 0
for number in range(3000):
    file = os.open(f'{number}', os.O_RDWR | os.O_CREAT)
    try: os.posix_fallocate(file, 0, 4 << 20)
    except OSError: break
    os.close(file)
    os.write(1, b'.')
"""
    outcome = run(sandbox, source, replace(PATIENT, folder_mb=8))
    assert outcome.stopped == "output" or outcome.exit == 0
    assert len(outcome.stdout) * 4 <= 8 * 8, "megabytes: at most eight times what it may have"


def test_no_file_of_the_system_can_be_opened_for_writing(sandbox: Sandbox) -> None:
    source = """
import os
opened = []
for path in ("/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/dev/mqueue/x", "/dev/tty",
             "/dev/ptmx", "/dev/kmsg", "/dev/vsock", "/dev/fuse", "/dev/kvm", "/sys/x", "/run/x", "/var/tmp/x", "/x", "/etc/x", "/dev/x"):
    try: opened.append(open(path, "r+b" if os.path.exists(path) else "wb"))
    except OSError: pass
print(opened)
"""
    assert said(sandbox, source) == "[]\n"


def test_attributes_of_files_and_processes_of_the_same_user(sandbox: Sandbox, tmp: Path) -> None:
    """Reaching them takes no more than their name or number, where no namespace hides them."""
    own = tmp / "own"
    own.write_text("mine")
    own.chmod(0o600)
    tmp.chmod(0o777)
    if os.getuid() == 0:  # as whom the programs run
        os.chown(own, 65534, 65534)
    before = own.stat()
    source = f"""
import os
own, other = {str(own)!r}, {os.getpid()}
done = []
for name, attempt in {{
    "chmod": lambda: os.chmod(own, 0o777), "utime": lambda: os.utime(own, (0, 0)), "xattr": lambda: os.setxattr(own, "user.x", b"y"),
    "chown": lambda: os.chown(own, -1, os.getgid()), "truncate": lambda: os.truncate(own, 0), "unlink": lambda: os.unlink(own),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, other, 19), "affinity": lambda: os.sched_setaffinity(other, [0]),
    "schedule": lambda: os.sched_setparam(other, os.sched_param(0)), "pidfd": lambda: os.pidfd_open(other),
    "kill": lambda: os.kill(other, 0),
}}.items():
    try: attempt(); done.append(name)
    except OSError: pass
print(done)
"""
    assert said(sandbox, source) == "[]\n"
    after = own.stat()
    assert (stat.S_IMODE(after.st_mode), after.st_mtime, after.st_size) == (0o600, before.st_mtime, 4)
    assert psutil.Process().nice() == os.getpriority(os.PRIO_PROCESS, 0)


def test_priorities_of_all_processes_of_the_same_user(sandbox: Sandbox) -> None:
    """Where a program's own are all that it sees, it may do as it likes with them."""
    assert sandbox.protections is not None
    out = said(sandbox, "import os; os.setpriority(os.PRIO_USER, 0, 19)")
    assert (out == "") if sandbox.protections.kind == "namespaces" else ("Operation not permitted" in out)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="takes gcc")
def test_a_compiled_program_still_runs(sandbox: Sandbox) -> None:
    """Although some walls let no program change the mode of a file."""
    language = LANGUAGES["c"]
    source = '#include <stdio.h>\nint main(void) { puts("compiled"); }\n'
    order = {"kind": "exec", "files": {language.file: source}, "command": language.compile, "keeps_result": True}
    compiled = sandbox.run(Program(order, limits=PATIENT))
    assert compiled.exit == 0, compiled
    order = {"kind": "exec", "files": {}, "command": language.run, "artifact": language.artifact}
    assert sandbox.run(Program(order, artifact=compiled.result, limits=PATIENT)).stdout == b"compiled\n"


@pytest.mark.parametrize("call", ["os.kill(0, 9)", "os.killpg(0, 9)", "os.killpg(os.getpgid(0), 19)"])
def test_signals_to_the_own_group_reach_nobody_else(sandbox: Sandbox, call: str) -> None:
    assert run(sandbox, f"import os\n{call}", replace(PATIENT, wall_s=3.0)).stopped in ("", "wall")


def test_the_group_that_started_the_sandbox_keeps_its_priority(sandbox: Sandbox) -> None:
    run(sandbox, "import os; os.setpriority(os.PRIO_PGRP, 0, 19)")
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_settings_of_the_kernel_cannot_be_written(sandbox: Sandbox) -> None:
    source = """
import os
written = []
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        path = os.path.join(folder, name)
        try:
            os.close(os.open(path, os.O_WRONLY))
            written.append(path)
        except OSError:
            pass
print(written)
"""
    assert said(sandbox, source) == "[]\n"


def test_a_pipe_that_nobody_reads_ends_its_writer(sandbox: Sandbox) -> None:
    command = ["sh", "-c", "while true; do echo y; done | head -n1"]
    outcome = sandbox.run(Program({"kind": "exec", "files": {}, "command": command}, limits=replace(PATIENT, cpu_s=5.0)))
    assert (outcome.stdout, outcome.stopped) == (b"y\n", "")
