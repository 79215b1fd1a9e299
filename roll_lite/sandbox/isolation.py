"""Isolate untrusted programs: by namespaces if the platform allows, else by landlock and seccomp. The preloaded interpreter
(zygote.py) is isolated; each program that it forks is isolated further."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_lite.sandbox import filesystem, kernel, seccomp
from roll_lite.sandbox.kernel import checked, libc
from roll_lite.sandbox.usage import read_status

NOBODY = 65534
FIRST_OF_OWN = 2_000_000_000
"""Base of sandboxes' user ids: a sandbox adds its process id, so that its processes can be counted and signalled separately.
"""
SHARED_BYTES = 16 << 20
ROOM = 2
"""Ratio of address space to memory limit: programs reserve more than they use."""
NPROC_ALLOWANCE = 512
"""Processes added to RLIMIT_NPROC, which also counts the user's processes outside the sandbox."""
OTHERS = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
NO_WALLS = 47
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TRUNCATE_ABI = 3
SCOPE_ABI = 6
"""First landlock version that also restricts signals and abstract sockets."""
TRIAL = {
    "cpu_s": 10,
    "memory_bytes": 1 << 30,
    "file_bytes": 1 << 20,
    "folder_bytes": 1 << 20,
    "folder_files": 16,
    "processes": 8,
    "open_files": 64,
    "address_space": False,
}


@dataclass
class Isolation:
    """Protections of this process.

    `held`: {protection (files, network, ...): mechanism that provides it}. `why_not`: why stronger mechanisms do not work here.
    """

    kind: str
    held: dict[str, str]
    why_not: list[str]
    own_users: bool = False
    filter: bytes = b""
    user: int = NOBODY


def isolate_interpreter(readable: Sequence[str], wanted: str) -> Isolation:
    """Isolate this process in the strongest way that works, up to `wanted`. A pid namespace takes effect at the next fork."""
    why_not: list[str] = []
    if wanted == "namespaces":
        trouble = _trouble_with(lambda: _try_namespaces(readable))
        if not trouble:
            return _namespaces(readable)
        why_not.append(f"namespaces: {trouble}")
    _shown_by_landlock(tuple(readable))  # cached here once, instead of in every program's process
    if wanted == "none":
        return Isolation("none", {}, why_not)
    isolation = Isolation("landlock", {}, why_not)
    _filter_calls(isolation, own_pid=0)
    abi = landlock_abi()
    if os.getuid() == 0 and _may_use_another_user():
        own = FIRST_OF_OWN + os.getpid()
        isolation.user = NOBODY if _trouble_with(lambda: _change_user(own)) else own
        isolation.held["users"] = f"user {isolation.user}, no capability but to read what landlock shows"
    elif os.getuid() == 0:
        why_not.append(f"users: this root may not start, kill and clean up after processes of user {NOBODY}")
    if isolation.filter and (abi >= TRUNCATE_ABI or (abi and "users" in isolation.held)):
        isolation.held["files"] = f"landlock (version {abi}), seccomp; known names and sizes can be looked up"
    else:
        why_not.append(f"files: landlock version {abi} alone lets programs empty or chmod them" if abi else "landlock: not in this kernel")
    lacks = _open_to_others(abi, bool(isolation.filter), _is_root_of_machine(), "users" in isolation.held)
    if lacks:
        why_not.append(f"processes: {lacks}")
    else:
        isolation.held["processes"] = "landlock, seccomp; killed as children of a subreaper"
    return isolation


def _try_namespaces(readable: Sequence[str]) -> None:
    isolation = _namespaces(readable)
    if (inner := os.fork()) == 0:
        isolate_program(isolation, filesystem.WORK, TRIAL, readable)
    elif os.waitpid(inner, 0)[1]:
        raise OSError("")  # the inner process has reported the cause


def _trouble_with(change: Callable[[], None]) -> str:
    """Return why a change to this process would fail; empty if it works. A child process tries it, because a process cannot undo it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = NO_WALLS
        try:
            change()
            status = 0
        except OSError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(status)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    cause = os.read(read, 1000).decode()
    os.close(read)
    return "" if status == 0 else cause or "refused"


def _namespaces(readable: Sequence[str]) -> Isolation:
    uid, gid = os.getuid(), os.getgid()
    own_users = True
    if _is_root_of_machine() or (uid == 0 and not _trouble_with(_change_user)):
        kernel.unshare(kernel.CLONE_NEWNS)
        filesystem.build_root(readable)
        own_users = not _trouble_with(_as_nobody)
        if own_users:
            _as_nobody()
        elif _may_use_another_user():  # programs will start under another user id
            kernel.unshare(OTHERS)
        else:
            raise PermissionError("no user namespace, and no right to start programs as another user and to kill them")
    else:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        kernel.write_id_maps(uid, gid)
        filesystem.build_root(readable)
        kernel.unshare(OTHERS)
    held = {
        "files": "mount namespace",
        "network": "network namespace",
        "processes": "pid namespace",
        "users": "user namespace" if own_users else f"user {NOBODY}, no capabilities",
    }
    isolation = Isolation("namespaces", held, [], own_users)
    _filter_calls(isolation)
    return isolation


def _is_root_of_machine() -> bool:
    """True for root of the machine, whom RLIMIT_NPROC does not limit; False for root in a user namespace."""
    with open("/proc/self/uid_map", encoding="ascii") as stream:  # noqa: PTH123
        return os.getuid() == 0 and stream.readline().split()[:2] == ["0", "0"]


def _may_use_another_user() -> bool:
    return kernel.has_capabilities(kernel.FOR_ANOTHER_USER) and not _trouble_with(_change_user)


def _change_user(user: int = NOBODY) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _as_nobody() -> None:
    """Enter a new user namespace, whose only user is NOBODY."""
    _change_user()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | OTHERS)
    kernel.write_id_maps(NOBODY, NOBODY)


def _filter_calls(isolation: Isolation, own_pid: int | None = None) -> None:
    try:
        isolation.filter = seccomp.build_filter(own_pid)
    except OSError as error:
        isolation.why_not.append(f"seccomp: {error}")
    else:
        network = isolation.held.get("network")
        isolation.held |= {"network": f"{network}, seccomp" if network else "seccomp", "system calls": "seccomp"}


def _open_to_others(abi: int, filtered: bool, is_root: bool, other_user: bool) -> str:
    if not abi or not filtered:
        return "keeping to themselves takes landlock and seccomp"
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # noqa: PTH110
        return "this kernel does not list a process's children"
    if is_root and not other_user:
        return "no limit holds for the number of root's own"
    if abi < SCOPE_ABI and not other_user:
        return f"landlock version {abi} lets signals through to processes of the same user (version {SCOPE_ABI} does not)"
    return ""


def isolate_program(isolation: Isolation, folder: str, limits: Mapping[str, Any], readable: Sequence[str]) -> None:
    os.setsid()  # signals to the process's own group would pass through pid namespaces
    if isolation.kind == "namespaces":
        _own_namespaces(isolation, limits)
    else:
        os.chdir(folder)
    own_user = isolation.user != NOBODY
    alone = isolation.kind == "namespaces" or own_user
    _set_limits(limits, 0 if alone else NPROC_ALLOWANCE + _threads_of(NOBODY if "users" in isolation.held else os.getuid()))
    if isolation.kind == "none":
        return
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    few_files = isolation.kind == "landlock" and landlock_abi() > 0
    if few_files:
        shown, named = _shown_by_landlock(tuple(readable))
        restrict_files(shown, [folder], filesystem.DEVICES, named)
    kept = 0
    if os.getuid() == 0 and not isolation.own_users and "users" in isolation.held:
        if few_files:  # needed to read an interpreter below root's home; landlock still limits what may be read
            kept = kernel.CAP_DAC_READ_SEARCH
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        _change_user(isolation.user)
    kernel.drop_capabilities(kept)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # last: a change of user resets it
    if isolation.filter:
        signals_stay = own_user or landlock_abi() >= SCOPE_ABI
        seccomp.install_filter(isolation.filter if isolation.kind == "namespaces" else seccomp.build_filter(os.getpid(), signals_stay))


@functools.cache
def _shown_by_landlock(readable: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return (readable paths, folders that may only be listed). The latter contain hidden paths: landlock cannot hide anything below a
    readable folder."""
    hidden, shown, named = filesystem.hidden_paths(readable), list[str](filesystem.SETTINGS), list[str]()
    for path in dict.fromkeys(map(os.path.realpath, (*filesystem.SYSTEM, *filesystem.readable_paths(readable)))):
        if os.path.exists(path):  # noqa: PTH110
            inner, names = filesystem.without_hidden(path, hidden)
            shown, named = shown + inner, named + names
    return list(dict.fromkeys(shown)), list(dict.fromkeys(named))


def _own_namespaces(isolation: Isolation, limits: Mapping[str, Any]) -> None:
    # With a seccomp filter, programs cannot leave anything in the outer network and IPC namespaces.
    kernel.unshare(kernel.CLONE_NEWNS if isolation.filter else kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    owner = "" if isolation.own_users else f",uid={NOBODY},gid={NOBODY}"
    kernel.mount(
        "tmpfs", filesystem.WORK, "tmpfs", safe, f"size={limits['folder_bytes']},nr_inodes={limits['folder_files']},mode=700{owner}"
    )
    kernel.mount("tmpfs", filesystem.SHARED, "tmpfs", safe | kernel.MS_NOEXEC, f"size={SHARED_BYTES},nr_inodes=256,mode=700{owner}")
    try:
        kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC)
        kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND)
        kernel.make_read_only("/proc/sys")  # contains settings of the outer namespaces, which the next program shares
    except OSError:  # the container hides parts of its /proc
        kernel.mount("tmpfs", "/proc", "tmpfs", safe | kernel.MS_RDONLY, "size=4k")
    os.chdir(filesystem.WORK)
    if isolation.own_users:
        kernel.unshare(kernel.CLONE_NEWUSER)


def _threads_of(user: int) -> int:
    """Count a user's threads on this machine: outside a user namespace, RLIMIT_NPROC counts them all."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # ended meanwhile, or not visible
            fields = read_status(int(name))
            total += fields.get(b"Threads:", 0) if fields.get(b"Uid:") == user else 0
    return total


def _set_limits(limits: Mapping[str, Any], others: int) -> None:
    wanted = {
        resource.RLIMIT_AS if limits["address_space"] else resource.RLIMIT_DATA: ROOM * limits["memory_bytes"],
        resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"] + 1 + others,
        resource.RLIMIT_CORE: 1,  # smaller than any core file; unlike 0, it also disables a core handler of the machine
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,  # includes timers; counted per user
        resource.RLIMIT_STACK: 64 << 20,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # Many programs raise their stack limit. The hard limit allows that, since the address space is limited anyway.
        resource.setrlimit(which, (value, hard if which == resource.RLIMIT_STACK else value))


def reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN if number in (signal.SIGXFSZ, signal.SIGPIPE) else signal.SIG_DFL)


def landlock_abi() -> int:
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], named: Iterable[str]) -> None:
    """Restrict this process and its children with landlock; requires no_new_privs. `named`: folders that may only be listed."""
    abi = landlock_abi()
    rights = RIGHTS_BY_ABI[max(known for known in RIGHTS_BY_ABI if known <= abi)]
    size = 24 if abi >= SCOPE_ABI else 16 if abi >= 4 else 8
    attributes = struct.pack("QQQ", rights, 3, 3)[:size]
    ruleset = checked(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset")
    try:
        for paths, allowed in ((readable, READ), (writable, rights), (devices, READ_FILE | WRITE_FILE), (named, READ_DIR)):
            for path in paths:
                _add(ruleset, path, allowed)
        checked(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        of_files = rights if os.path.isdir(path) else rights & (EXECUTE | WRITE_FILE | READ_FILE | 1 << 14)  # noqa: PTH112
        rule = struct.pack("=Qi", of_files, fd)
        checked(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(fd)
