from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import struct
import sys
import time

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CAP_DAC_READ_SEARCH = 1 << 2
FOR_ANOTHER_USER = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY_NOSUID_NODEV = 0x7
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def memory_file(content: bytes = b"") -> int:
    file = os.memfd_create("program")
    with open(file, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def read_line(file: int, deadline: float, most: int = sys.maxsize, heard: bytes = b"") -> bytes:
    """Read a pipe or socket up to a line feed, its end, or more than `most` bytes; TimeoutError at `deadline` of the monotonic clock."""
    poller, parts = select.poll(), [heard]
    poller.register(file, select.POLLIN)
    while b"\n" not in parts[-1] and sum(map(len, parts)) <= most:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        parts.append(os.read(file, 1 << 20))
        if not parts[-1]:
            break
    return b"".join(parts)


KILL, PAUSE, RESUME = b" ", b"\t", b"\n"
"""One-byte commands to kill, pause or resume the program. They are white space, so that the request
reader skips commands after its end."""
OUT_OF_TIME = int(signal.SIGPROF)


def limit_cpu(seconds: float) -> None:
    """End this process after `seconds` of CPU time, with exit status OUT_OF_TIME."""
    # C's `_exit` is the handler, because the first process of a pid namespace ignores signals without a handler.
    libc.signal(signal.SIGPROF, ctypes.cast(libc._exit, ctypes.c_void_p))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def unshare(flags: int) -> None:
    checked(libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    checked(libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    data = options.encode() if options else None
    checked(libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data), f"mount {target}")


def make_read_only(target: str) -> None:
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, buffer, ctypes.c_size_t(len(attributes)))
    if result < 0:  # before Linux 5.12: only the mount itself
        mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def pivot_root(folder: str) -> None:
    os.chdir(folder)
    checked(libc.syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)][:4]
    checked(libc.prctl(option, *arguments), f"prctl({option})")


def drop_capabilities(keep: int) -> None:
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last capability, or not permitted: nothing to drop
            break
    header = struct.pack("Ii", 0x20080522, 0)
    for kept in (keep, 0):  # a container may lack the capabilities to keep
        if libc.capset(header, struct.pack("IIIIII", kept, kept, 0, 0, 0, 0)) == 0:
            return
    checked(-1, "capset")


def has_capabilities(wanted: int) -> bool:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
        held = next(int(line.split()[1], 16) for line in stream if line.startswith("CapEff:"))
    return held & wanted == wanted


def write_id_maps(uid: int, gid: int) -> None:
    """Map root in this process's new user namespace to `uid` and `gid` outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(text)
