from __future__ import annotations

import ctypes
import errno
import platform
import struct
from resource import RLIMIT_CORE

from roll_lite.sandbox.kernel import PR_SET_DUMPABLE, PR_SET_SECCOMP, prctl


def _calls(table: str) -> list[tuple[int, int]]:
    rows = [line.partition("#")[0].split() for line in table.splitlines()]
    return [(int(one), int(other)) for _, one, other in filter(None, rows)]


DENIED = _calls("""
socket 41 198
setsockopt 54 208
landlock_create_ruleset 444 444  # its rules take kernel memory
landlock_add_rule 445 445
landlock_restrict_self 446 446
seccomp 317 277
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
kcmp 312 272
pidfd_getfd 438 438
pidfd_send_signal 424 424
process_madvise 440 440
mount 165 40
umount2 166 39
pivot_root 155 41
chroot 161 51
unshare 272 97
setns 308 268
open_tree 428 428
move_mount 429 429
fsopen 430 430
fsconfig 431 431
fsmount 432 432
fspick 433 433
mount_setattr 442 442
name_to_handle_at 303 264
open_by_handle_at 304 265
memfd_create 319 279
memfd_secret 447 447
# Shared memory, semaphores and queues of the same user elsewhere: reachable without an IPC namespace.
shmget 29 194
shmat 30 196
shmctl 31 195
shmdt 67 197
semget 64 190
semop 65 193
semctl 66 191
semtimedop 220 192
msgget 68 186
msgsnd 69 189
msgrcv 70 188
msgctl 71 187
mq_open 240 180
mq_unlink 241 181
mq_timedsend 242 182
mq_timedreceive 243 183
mq_notify 244 184
mq_getsetattr 245 185
flock 73 32  # even a read-only descriptor could lock a shown file against its owner
sync 162 81  # affects the whole machine
syncfs 306 267
migrate_pages 256 238
move_pages 279 239
process_mrelease 448 448
io_setup 206 0
vmsplice 278 75
io_uring_setup 425 425
io_uring_enter 426 426
io_uring_register 427 427
bpf 321 280
perf_event_open 298 241
userfaultfd 323 282
fanotify_init 300 262
inotify_init 253 26
inotify_init1 294 26
inotify_add_watch 254 27
keyctl 250 219
add_key 248 217
request_key 249 218
syslog 103 116
acct 163 89
swapon 167 224
swapoff 168 225
reboot 169 142
sethostname 170 161
setdomainname 171 162
init_module 175 105
finit_module 313 273
delete_module 176 106
kexec_load 246 104
kexec_file_load 320 294
quotactl 179 60
quotactl_fd 443 443
open_tree_attr 467 467
settimeofday 164 170
clock_settime 227 112
adjtimex 159 171
clock_adjtime 305 266
vhangup 153 58
personality 135 92
""")
SIGNALS = _calls("""
# Denied towards other processes if no pid namespace, landlock scope or separate user confines signals.
kill 62 129
tkill 200 130
tgkill 234 131
rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240
""")
OF_OTHERS = _calls("""
# Denied towards other processes in any case.
prlimit64 302 261
sched_setaffinity 203 122
sched_setscheduler 144 119
""")
ATTRIBUTES = _calls("""
# Attributes of the same user's files and processes; denied without namespaces. Landlock guards none of these.
chmod 90 -1
fchmod 91 52
fchmodat 268 53
fchmodat2 452 452
chown 92 -1
fchown 93 55
lchown 94 -1
fchownat 260 54
utime 132 -1
utimes 235 -1
futimesat 261 -1
utimensat 280 88
setxattr 188 5
lsetxattr 189 6
fsetxattr 190 7
removexattr 197 14
lremovexattr 198 15
fremovexattr 199 16
setxattrat 463 463
removexattrat 466 466
file_setattr 469 469
setpriority 141 140
ioprio_set 251 30
sched_setparam 142 118
sched_setattr 314 274
pidfd_open 434 434
sendmsg 46 211  # an open file in flight in a socket is charged to no process
sendmmsg 307 269
fallocate 285 47  # fills the disk between two samples
""")
SET_LIMIT, PRLIMIT, CLONE, CLONE3, MMAP, PRCTL, SOCKETPAIR, IOCTL, FCNTL = _calls("""
setrlimit 160 164
prlimit64 302 261
clone 56 220
clone3 435 435
mmap 9 222
prctl 157 167
socketpair 53 199
ioctl 16 29
fcntl 72 25
""")
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed ioctl requests; other requests could change flags of read-only files."""
FCNTLS = (8, 10, 15, 1024, 1026, 1031, 1036, 1038)
SHARED, ANONYMOUS = 0x01, 0x20
STREAM, PACKETS_IN_ORDER = 1, 5
NEW_NAMESPACES = 0x7E020000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Bit that marks calls of the x32 ABI, a second way to make system calls on x86_64."""

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ARGUMENTS = 16
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def build_filter(own_pid: int | None = None, signals_stay: bool = False) -> bytes:
    """Build the filter for `install_filter`. OSError on machines other than x86_64 and aarch64.

    `own_pid`: process of a program without namespaces, which may not act on other processes or change file attributes.
    `signals_stay`: signals are confined elsewhere (Landlock, a separate user).
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {machine}")
    column = list(AUDIT_ARCH).index(machine)
    code = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        code += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    denied = DENIED if own_pid is None else DENIED + ATTRIBUTES
    for number in (numbers[column] for numbers in denied if numbers[column] >= 0):
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    code += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    if own_pid is not None:
        for numbers in OF_OTHERS if signals_stay else SIGNALS + OF_OTHERS:  # the first argument must be 0 or the own process
            code += _where(numbers[column], 0, [(JUMP_EQUAL, 2, 0, 0), (JUMP_EQUAL, 1, 0, own_pid)])
        # Only streams and sequenced packets: a datagram socket can send to any other socket by name.
        code += _where(SOCKETPAIR[column], 1, [(AND, 0, 0, 0xF), (JUMP_EQUAL, 2, 0, STREAM), (JUMP_EQUAL, 1, 0, PACKETS_IN_ORDER)])
    code += _where(IOCTL[column], 1, [(JUMP_EQUAL, len(IOCTLS) - place, 0, one) for place, one in enumerate(IOCTLS)])
    for one in FCNTLS:
        code += _where(FCNTL[column], 1, [(JUMP_EQUAL, 0, 1, one)])
    code += _where(CLONE[column], 0, [(JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES)])
    # Refuse shared anonymous memory: while one page is mapped, all of it stays allocated, charged to no process.
    code += _where(MMAP[column], 3, [(JUMP_ANY_BIT, 0, 2, ANONYMOUS), (JUMP_ANY_BIT, 0, 1, SHARED)])
    code += _where(PRCTL[column], 0, [(JUMP_EQUAL, 1, 0, PR_SET_DUMPABLE), (JUMP_EQUAL, 0, 1, PR_SET_SECCOMP)])
    low, high = ((LOAD, 0, 0, ARGUMENTS + 8 * 2 + half) for half in (0, 4))
    is_new_core = [(JUMP_EQUAL, 0, 5, RLIMIT_CORE), low, (JUMP_EQUAL, 0, 2, 0), high, (JUMP_EQUAL, 1, 0, 0)]
    # The core limit may not be changed: a limit of 1 disables the machine's crash handler, 0 would not.
    code += _where(SET_LIMIT[column], 0, [(JUMP_EQUAL, 0, 1, RLIMIT_CORE)])
    code += _where(PRLIMIT[column], 1, is_new_core)
    code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _where(number: int, argument: int, tests: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """BPF instructions (code, jump if true, jump if false, operand) that refuse a system call unless one of `tests` on its `argument` jumps
    past the refusal."""
    block = [(LOAD, 0, 0, ARGUMENTS + 8 * argument), *tests, (RETURN, 0, 0, REFUSE | errno.EPERM), (LOAD, 0, 0, 0)]
    return [(JUMP_EQUAL, 0, len(block), number), *block]


def install_filter(code: bytes) -> None:
    instructions = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions)))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))
