"""Landlock: restricts the files that a process may access, if no mount namespace is available."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from roll_lite.sandbox.kernel import checked, libc

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TRUNCATE_ABI = 3
SCOPE_ABI = 6
"""First version that also confines signals and abstract sockets."""


def landlock_abi() -> int:
    """Version of landlock in this kernel; 0: none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], named: Iterable[str]) -> None:
    """Restrict this process and its children to these paths; needs no_new_privs. `named`: folders whose names alone may be read."""
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
