"""Programs that take more than they were given, by ways that no book of the kernel shows at first sight."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox.running import LIMITS, PATIENT, refused, run, said

from roll_lite.sandbox import cgroup, filesystem, pool
from roll_lite.sandbox.filesystem import CLAIM_S, DEEPEST, claim, claimed_by_none, fits, remove_folder
from roll_lite.sandbox.pool import Program, Sandbox, SandboxPool
from roll_lite.sandbox.usage import Usage

ONE_SECOND = replace(PATIENT, cpu_s=1.0, wall_s=40.0)
LIBC = """
import ctypes, os, socket, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
def mapped(flags, size=1 << 20): return libc.mmap(None, size, 3, flags, -1, 0) not in (None, 2**64 - 1)
"""


@pytest.fixture(scope="module", params=["kernel's counts", "looks from outside"])
def counting(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """With a control group and, where one cannot be had or is not wanted, without."""
    sandbox = Sandbox()
    sandbox._settings["control_group"] = request.param == "kernel's counts"
    try:
        if not sandbox.start().counted and sandbox._settings["control_group"]:
            pytest.skip("no control group can be made here")
        yield sandbox
    finally:
        sandbox.close()


CHAINS = {
    "children that nobody waits for": """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.02: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
""",
    "several at a time": """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    for _ in range(3):
        try:
            if os.fork() == 0:
                while time.process_time() < 0.01: pass
                os._exit(0)
        except BlockingIOError: pass
    time.sleep(0.01)
""",
}


@pytest.mark.parametrize("chain", CHAINS)
def test_computing_in_children_too_short_lived_to_be_seen(counting: Sandbox, chain: str) -> None:
    outcome = run(counting, CHAINS[chain], ONE_SECOND)
    assert outcome.stopped == "cpu" and outcome.cpu_s < 3


def test_waiting_children_cost_nothing(counting: Sandbox) -> None:
    source = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        time.sleep(0.04)
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
print('done')
"""
    outcome = run(counting, source, ONE_SECOND)
    assert (outcome.stdout, outcome.stopped) == (b"done\n", "")


def test_a_control_group_is_gone_with_its_sandbox() -> None:
    sandbox = Sandbox()
    try:
        if not sandbox.start().counted:
            pytest.skip("no control group can be made here")
        folder = Path(sandbox._group)
        assert folder.is_dir() and "control group" in sandbox.protections.describe()  # type: ignore[union-attr]
    finally:
        sandbox.close()
    assert not folder.exists()


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize(
    "attempt",
    [
        "mapped(0x21)",
        "mapped(0x23)",
        "mmap.mmap(-1, 4096)",
        "open('/dev/zero', 'r+b')",
        "libc.syscall(278, 1, None, 0, 8) == 0",
        "libc.syscall(206, 100, ctypes.byref(ctypes.c_ulong())) == 0",
        "libc.prctl(4, 0, 0, 0, 0) == 0",
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are of x86_64")
def test_memory_that_no_process_shows(sandbox: Sandbox, attempt: str) -> None:
    """Shared and in no file, pinned by a pipe, of the machine's few, or of a process that hides."""
    source = f"{LIBC}\ntry: print('did' if {attempt} else 'refused')\nexcept OSError: print('refused')"
    assert said(sandbox, source) == "refused\n"
    assert said(sandbox, f"{LIBC}\nprint(mapped(0x22))") == "True\n", "a process's own memory is in its books"


def test_disk_in_files_without_a_name(sandbox: Sandbox) -> None:
    source = """
import os, time
kept = []
for number in range(20):
    kept.append(open(f'{number}', 'wb'))
    os.unlink(f'{number}')
    kept[-1].write(bytes(3 << 20)); kept[-1].flush()
time.sleep(90)
"""
    outcome = run(sandbox, source, PATIENT)
    assert outcome.stopped == "output" or b"No space left" in outcome.stderr, outcome


def test_disk_in_mapped_files_without_a_name(sandbox: Sandbox) -> None:
    source = """
import mmap, os, time
kept = []
for number in range(20):
    with open(f'{number}', 'w+b') as stream:
        stream.write(bytes(3 << 20)); stream.flush()
        kept.append(mmap.mmap(stream.fileno(), 4096))
    os.unlink(f'{number}')
time.sleep(90)
"""
    outcome = run(sandbox, source, PATIENT)
    assert outcome.stopped == "output" or b"No space left" in outcome.stderr, outcome


WRITERS = {
    "one file after the other": """
for number in itertools.count():
    file = new(number)
    for _ in range(16): write(file)
    os.close(file)
""",
    "a late burst": """
time.sleep(0.3)
for number in itertools.count():
    file = new(number)
    for _ in range(16): write(file)
    os.close(file)
""",
    "small files": """
for number in itertools.count():
    file = new(number)
    write(file)
    os.close(file)
""",
    "deleted files": """
kept = []
for number in itertools.count():
    kept.append(new(number))
    os.unlink(str(number))
    for _ in range(16): write(kept[-1])
""",
    "sparse files, mapped": """
for number in itertools.count():
    file = new(number)
    os.truncate(file, 4 << 20)
    pages = mmap.mmap(file, 4 << 20)
    for place in range(0, 4 << 20, PIECE):
        pages[place : place + PIECE] = bytes(PIECE)
        told()
    os.close(file)
""",
    "processes that append to the same files": """
for _ in range(3):
    if os.fork() == 0: break
for number in itertools.count():
    file = new(number)
    try:
        for _ in range(16): write(file)
    except OSError: pass
    os.close(file)
""",
}
PIECE, FOLDER_MB, FAR = 1 << 17, 32, 6
WRITING = f"""
import itertools, mmap, os, time
PIECE = {PIECE}
def told():
    os.write(1, b".")
    if os.fstat(1).st_size > {FAR * (FOLDER_MB << 20) // PIECE}: os._exit(0)
def write(file):
    os.write(file, bytes(PIECE))
    told()
def new(number): return os.open(f"{{number}}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
"""


@pytest.fixture(scope="module", params=[0.05, 60.0], ids=["sampled", "before any sample"])
def measured(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Without mount namespaces: a folder on the machine's disk."""
    before = pool.BOOT
    pool.BOOT = before.replace("main(", f"import roll_lite.sandbox.zygote as it; it.FIRST_LOOK_S = it.LOOK_S = {request.param}; it.main(")
    sandbox = Sandbox("landlock")
    try:
        if sandbox.start().missing:
            pytest.skip("no sandbox of this kind can be built here")
        yield sandbox
    finally:
        sandbox.close()
        pool.BOOT = before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WRITERS)
def test_a_folder_hardly_outgrows_its_limit_however_fast_it_is_written(measured: Sandbox, way: str) -> None:
    """The program counts its writes. The best of three counts: a busy machine may keep the sandbox from the processor, not the program."""
    written = []
    for _ in range(3):
        outcome = run(measured, WRITING + WRITERS[way], replace(PATIENT, folder_mb=FOLDER_MB))
        assert outcome.stopped in ("output", ""), outcome
        written.append(len(outcome.stdout) * PIECE / (FOLDER_MB << 20))
    assert min(written) < 2, written


DEEP = """
import os, time
for _ in range(40):
    os.mkdir('d' * 200)
    os.chdir('d' * 200)
for number in range(20): open(f'{number}', 'wb').write(bytes(3 << 20))
time.sleep(90)
"""


def test_disk_below_a_path_that_is_too_long_to_be_named(sandbox: Sandbox) -> None:
    outcome = run(sandbox, DEEP, PATIENT)
    assert outcome.stopped == "output" or b"No space left" in outcome.stderr, outcome


def test_nesting_without_end_is_looked_at_to_a_depth(tmp_path: Path) -> None:
    place = tmp_path
    for _ in range(DEEPEST + 3):
        place = place / "d"
        place.mkdir()
    assert not fits(str(tmp_path), 1 << 20, 4096)
    assert fits(str(tmp_path / "d" / "d" / "d" / "d"), 1 << 20, 4096)


def test_what_has_many_names_shows_them_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder that is looked into takes time, in which more are made."""
    looked: list[str] = []
    entries = filesystem._entries
    monkeypatch.setattr(filesystem, "_entries", lambda place, root: looked.append(place) or entries(place, root))  # type: ignore[func-returns-value]
    for outer in range(4):
        for number in range(30):
            (tmp_path / f"{outer}" / f"{number}").mkdir(parents=True)
    assert not fits(str(tmp_path), 1 << 20, 100) and len(looked) <= 5


def test_removing_what_is_deep_and_closed(tmp_path: Path) -> None:
    left, here = tmp_path / "left", Path.cwd()
    left.mkdir()
    (left / "removed-0").mkdir()
    os.chdir(left)
    try:
        for number in range(700):
            os.mkdir("d")  # noqa: PTH102
            os.mkdir("closed", 0)  # noqa: PTH102
            os.symlink("/", "link")  # noqa: PTH211
            os.chdir("d")
            (Path() / f"{number}").touch()
    finally:
        os.chdir(here)
    remove_folder(str(left))
    remove_folder(str(left))
    assert not left.exists()


EXECUTED = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main() {
    for (int i = 0; i < 24 && fork(); i++) ;
    memset(malloc(10 << 20), 1, 10 << 20);
    sleep(60);
}
"""


@pytest.mark.usefixtures("works_after")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="takes gcc")
def test_memory_of_processes_that_share_nothing_with_the_interpreter(sandbox: Sandbox, tmp_path: Path) -> None:
    """240 MB where 160 are allowed; what each shares with a warm interpreter would be as much again, but these share nothing."""
    (tmp_path / "main.c").write_text(EXECUTED)
    subprocess.run(["gcc", "-o", str(tmp_path / "main"), str(tmp_path / "main.c")], check=True)
    order = {"kind": "exec", "files": {}, "command": ["./main"], "artifact": "main"}
    program = Program(order, artifact=(tmp_path / "main").read_bytes(), limits=replace(PATIENT, memory_mb=160, processes=32, wall_s=8.0))
    assert sandbox.run(program).stopped == "memory"


def test_processes_that_share_all_with_the_interpreter_cost_little(sandbox: Sandbox) -> None:
    source = "import os, time\nfor _ in range(24):\n    if os.fork() == 0: break\ntime.sleep(0.5)"
    assert run(sandbox, source, replace(PATIENT, memory_mb=64, processes=32)).stopped == ""


MAPPINGS = f"""{LIBC}
import time
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for _ in range(14):
    if os.fork() == 0: break
size = 60_000 * 4096
start = libc.mmap(None, size, 3, 0x22, -1, 0)
for place in range(0, size, 8192): libc.mprotect(start + place, 4096, 1)
time.sleep(90)
"""


@pytest.mark.usefixtures("works_after")
def test_memory_of_the_kernel_for_many_mappings(sandbox: Sandbox) -> None:
    outcome = run(sandbox, MAPPINGS, replace(PATIENT, memory_mb=192, wall_s=30.0))
    assert outcome.stopped in ("memory", "output"), outcome


def test_a_folder_that_cannot_be_looked_into_is_no_place_to_hide(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "large").write_bytes(bytes(1 << 20))
    (tmp_path / "closed").chmod(0)
    assert not fits(str(tmp_path), 1 << 19, 10)
    assert fits(str(tmp_path), 1 << 21, 10)
    assert not fits(str(tmp_path), -1, 10)


def test_a_folder_that_nobody_may_read_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "left" / "inner"
    place.mkdir(parents=True)
    (place / "file").touch()
    place.chmod(0)
    place.parent.chmod(0o300)
    remove_folder(str(tmp_path / "left"))
    assert not (tmp_path / "left").exists()


def test_what_killed_sandboxes_left_is_found_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    old, new, used, other = (tmp_path / name for name in ("x-old", "x-new", "x-used", "y"))
    for folder in (old, new, used, other):
        folder.mkdir()
    for folder in (old, used, other):
        os.utime(folder, (0, time.time() - CLAIM_S - 1))
    held = claim(str(used))
    assert list(claimed_by_none(str(tmp_path), "x-")) == [str(old)]
    os.close(held)
    assert sorted(claimed_by_none(str(tmp_path), "x-")) == [str(old), str(used)]


@pytest.mark.parametrize("name", ["/tmp/x", "\\0x"])
def test_messages_to_sockets_of_the_host(sandbox: Sandbox, name: str) -> None:
    attempt = f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {name!r})"
    refused(sandbox, attempt, "import socket")


def test_ending_ones_own_child(sandbox: Sandbox) -> None:
    assert said(sandbox, "import subprocess\np = subprocess.Popen(['sleep', '50'])\np.kill()\nprint(p.wait())") == "-9\n"


@pytest.mark.one_in(2)
def test_processes_of_a_neighbour_that_starts_later(sandbox: Sandbox) -> None:
    neighbour = Sandbox(str(sandbox._settings["walls"]))
    try:
        neighbour.start()
        many = "import os, time\nfor _ in range(14):\n    if os.fork() == 0: break\ntime.sleep(2)"
        thread = threading.Timer(0.3, lambda: run(neighbour, many, replace(LIMITS, wall_s=8.0)))
        thread.start()
        source = (
            "import os, time\ntime.sleep(1.2)\nfor _ in range(8):\n    if os.fork() == 0: time.sleep(0.1); os._exit(0)\nprint('forked')"
        )
        assert said(sandbox, source) == "forked\n"
        thread.join()
    finally:
        neighbour.close()


# ---------------------------------------------------------------- control groups that this machine may not have


def fake_group(folder: Path) -> cgroup.Group:
    """Plain files where a kernel with all controllers has its own: it shows what is written and read, not that a kernel obeys it."""
    for name, text in {"cgroup.procs": "", "cpu.stat": "usage_usec 5000000\nuser_usec 1\n", "memory.events": "oom_kill 2\n"}.items():
        (folder / name).write_text(text)
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (folder / name).touch()
    return cgroup.Group(str(folder))


GIVEN = {"cpu_s": 1.0, "memory_bytes": 256 << 20, "folder_bytes": 8 << 20, "file_bytes": 4 << 20, "processes": 16, "folder_files": 9}


def test_what_a_group_is_told_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Usage, "_in_sockets", lambda self: 0)  # those of the whole machine, where there is no namespace
    group = fake_group(tmp_path)
    assert group.counts == ("computing", "memory", "processes")
    usage = Usage(group, namespaces=True)
    usage.begin(GIVEN, "")
    assert (tmp_path / "memory.max").read_text() == str((256 + 8 + 3 * 4 + 32) << 20)
    assert [(tmp_path / name).read_text() for name in ("memory.swap.max", "pids.max")] == ["0", "18"]
    group.enter()
    assert (tmp_path / "cgroup.procs").read_text() == "0"
    assert usage.exceeded_limit(0, []) == "" and not group.out_of_memory()
    (tmp_path / "cpu.stat").write_text("usage_usec 6200000\n")
    (tmp_path / "memory.events").write_text("oom_kill 3\n")
    assert usage.cpu_s() == pytest.approx(1.2, abs=0.1) and group.out_of_memory()
    assert usage.exceeded_limit(0, []) == "cpu"
    usage.begin(GIVEN, "")
    assert usage.cpu_s() == pytest.approx(0.0, abs=0.1) and not group.out_of_memory(), "the next program begins at nothing"


def test_a_group_with_fewer_controllers_counts_fewer(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "cpu.stat").write_text("usage_usec 1\n")
    group = cgroup.Group(str(tmp_path))
    group.begin(GIVEN)
    assert group.counts == ("computing",) and not group.out_of_memory()


def test_no_group_where_none_can_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroup, "_parents", lambda: [str(tmp_path)])
    assert cgroup.make_group() is None
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_programs_of_a_pool_run_in_groups_of_their_own() -> None:
    pool = SandboxPool(2)
    try:
        pool.start()
        groups = [sandbox._group for sandbox in pool._sandboxes]
        assert groups == ["", ""] or len(set(groups)) == 2
    finally:
        pool.close()
