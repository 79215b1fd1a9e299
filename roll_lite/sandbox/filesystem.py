"""File system of a sandboxed program: interpreter and system libraries, read-only, and an empty folder to write to. Without a mount
namespace, the folder's size is measured from outside."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from roll_lite.sandbox.kernel import (
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    make_read_only,
    mount,
    pivot_root,
)

SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *(f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "include")),
    *(f"/usr/local/{name}" for name in ("bin", "sbin", "lib", "lib64", "libexec", "include")),
    *(f"/usr/share/{name}" for name in ("zoneinfo", "locale", "i18n", "terminfo", "perl", "perl5", "nodejs", "node_modules")),
    "/usr/share/rubygems-integration",
)
PACKAGES = ("site-packages", "dist-packages")
"""Folders hidden from programs, because a package may contain a data set with answers."""
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/openssl.cnf")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Allowed devices, without /dev/zero: shared memory mapped from it is charged to no process."""
CLAIM_S = 60.0
DEEPEST = 256
BLOCK = 512
SHARED = "/dev/shm"
WORK = "/sandbox"


def readable_paths(more: Iterable[str]) -> list[str]:
    hidden, kept = hidden_paths(more), list[str]()
    prefixes = map(os.path.realpath, (sys.base_prefix, sys.base_exec_prefix))
    found = [f"{prefix}/{name}" for prefix in prefixes for name in ("bin", "lib", "lib64")]
    interpreter = [os.path.dirname(os.path.realpath(os.__file__)), *filter(os.path.isdir, found)]  # noqa: PTH120
    for path in sorted({*interpreter, *more}):
        if _below(path, hidden) or not _below(path, (*SYSTEM, *kept)):
            kept.append(path)
    return kept


def hidden_paths(more: Iterable[str]) -> list[str]:
    libraries = [os.path.dirname(os.path.realpath(os.__file__)), *glob.glob("/usr/local/lib/python3*")]  # noqa: PTH120, PTH207
    found = {os.path.realpath(f"{library}/{name}") for library in libraries for name in PACKAGES}
    asked = [os.path.realpath(path) for path in more]
    return sorted(path for path in found if os.path.isdir(path) and not _below(path, asked))  # noqa: PTH112


def _below(path: str, others: Iterable[str]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in others)


def without_hidden(path: str, hidden: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a path into (paths in which nothing is hidden, folders with hidden paths, which may only be listed)."""
    if path in hidden:
        return [], []
    if not any(_below(one, [path]) for one in hidden):
        return [path], []
    parts, named = list[str](), [path]
    for name in sorted(os.listdir(path)):  # noqa: PTH208
        inner, more = without_hidden(f"{path}/{name}", hidden)
        parts, named = parts + inner, named + more
    return parts, named


def build_root(more: Iterable[str]) -> None:
    shown, hidden = readable_paths(more), hidden_paths(more)
    for scratch in (tempfile.gettempdir(), "/mnt", "/media", "/srv", "/run"):
        if os.path.isdir(scratch) and not any(f"{path}/".startswith(f"{scratch}/") for path in shown):  # noqa: PTH112
            break
    else:
        raise OSError("every folder that could be mounted over holds something that programs are to see")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in SYSTEM:
        if os.path.islink(path):  # noqa: PTH114
            os.symlink(os.readlink(path), f"{scratch}{path}")  # noqa: PTH115, PTH211
        elif os.path.isdir(path):  # noqa: PTH112
            _show(path, scratch)
    for path in (*SETTINGS, *(path for path in shown if not _below(path, hidden))):
        if os.path.exists(path):  # noqa: PTH110
            _show(path, scratch)
    for path in hidden:
        mount("tmpfs", f"{scratch}{path}", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in shown:
        if _below(path, hidden) and os.path.exists(path):  # noqa: PTH110
            _show(path, scratch)
    for path in hidden:
        make_read_only(f"{scratch}{path}")
    for path in DEVICES:
        _make_target(f"{scratch}{path}", folder=False)
        mount(path, f"{scratch}{path}", None, MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{scratch}/dev/{name}")  # noqa: PTH211
    for folder in ("/proc", SHARED, WORK):
        os.mkdir(f"{scratch}{folder}", 0o755)  # noqa: PTH102
    if not os.path.lexists(f"{scratch}/tmp"):
        os.symlink(WORK, f"{scratch}/tmp")  # noqa: PTH211
    # A user namespace may mount /proc only if one is visible already; programs never see this one.
    mount("/proc", f"{scratch}/proc", None, MS_BIND | MS_REC)
    # Ordinary users' programs own this folder. If it were writable, files left in it would be visible to the next program.
    mount("none", scratch, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    pivot_root(scratch)


def _show(path: str, scratch: str) -> None:
    target = f"{scratch}{path}"
    _make_target(target, folder=os.path.isdir(path))  # noqa: PTH112
    mount(path, target, None, MS_BIND | MS_REC)
    make_read_only(target)


def _make_target(target: str, folder: bool) -> None:
    os.makedirs(target if folder else os.path.dirname(target), 0o755, exist_ok=True)  # noqa: PTH103, PTH120
    if not folder:
        with open(target, "w", encoding="ascii"):  # noqa: PTH123
            pass


def fits(folder: str, most_bytes: int, most_files: int) -> bool:
    """True if the folder is within the limits. Files removed meanwhile are skipped."""
    taken = seen = 0
    waiting, root = collections.deque([folder]), os.path.realpath(folder)  # breadth-first, to count many names early
    if most_bytes < 0:
        return False
    while waiting:
        place = waiting.popleft()
        try:
            with _entries(place, root) as entries:
                for entry in entries:
                    seen += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{place}/{entry.name}")
                    else:
                        taken += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                    if seen > most_files or taken > most_bytes or place.count("/") > DEEPEST + folder.count("/"):
                        return False
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False
    return True


@contextlib.contextmanager
def _entries(place: str, root: str) -> Iterator[Any]:
    """List a folder while the program may still run. Held open, the folder cannot become a symlink."""
    pinned = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        itself = f"/proc/self/fd/{pinned}"
        if not f"{os.readlink(itself)}/".startswith(f"{root}/"):  # noqa: PTH115
            raise FileNotFoundError(place)
        try:
            opened = os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            os.chmod(itself, 0o700)  # noqa: PTH101
            opened = os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(opened) as entries:
                yield entries
        finally:
            os.close(opened)
    finally:
        os.close(pinned)


def remove_folder(folder: str) -> None:
    """Remove a folder, even if it is very deep or has unreadable subfolders."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder):  # noqa: PTH112
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            os.spawnvp(os.P_WAIT, command[0], [*command, "--", folder])


def claim(folder: str) -> int:
    """Mark a folder as in use while the returned file descriptor is open."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def claimed_by_none(parent: str, prefix: str) -> Iterator[str]:
    """Yield this user's unused folders, except those younger than CLAIM_S, which may still be claimed."""
    for name in os.listdir(parent):  # noqa: PTH208
        path = f"{parent}/{name}"
        with contextlib.suppress(OSError):
            if not name.startswith(prefix) or os.lstat(path).st_uid != os.getuid() or time.time() - os.lstat(path).st_mtime < CLAIM_S:
                continue
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(held)
