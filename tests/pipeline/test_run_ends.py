"""However a run ends, its folder says how. Real processes, real signals; the pipeline is a stand-in (run_driver.py)."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support_disks import small_disk

from roll_lite.distributed.watchdog import WATCHDOG, Preempted, PreemptedUnsaved
from roll_lite.pipeline.run import Interruption, RunEnd

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


@contextmanager
def driver(how: str, tmp: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """The program, once it has said that it is ready."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "distributed")])
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("run_driver.py")), how, str(tmp / "runs"), *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "TMPDIR": str(tmp), "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            wanted = "line 1" if how == "talking" else "ready"
            for line in process.stdout:
                if line.startswith(wanted):
                    break
            else:
                raise AssertionError(process.stderr.read())
            yield process
        finally:
            process.kill()
            process.wait()


def summary(tmp: Path) -> dict[str, Any]:
    return json.loads((tmp / "runs" / "latest" / "summary.json").read_text())


def part(process: subprocess.Popen[str], name: str) -> psutil.Process:
    (found,) = [child for child in psutil.Process(process.pid).children() if child.name() == name]
    return found


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("numbers", [[signal.SIGHUP], [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]])
@pytest.mark.usefixtures("signals_arrive")
def test_a_closed_terminal_interrupts_a_run(tmp: Path, numbers: list[signal.Signals]) -> None:
    with driver("waiting", tmp) as process:
        process.stdout.close()  # type: ignore[union-attr]
        for number in numbers:
            process.send_signal(number)
        assert process.wait(SECONDS) == 130
    assert summary(tmp)["exit"] == "interrupted"


def test_a_run_goes_on_when_nobody_reads_its_output(tmp: Path) -> None:
    with driver("talking", tmp) as process:
        process.stdout.close()  # type: ignore[union-attr]
        assert process.wait(SECONDS) == 0
        assert process.stderr.read() == "nobody reads the output any more; the run goes on\n"  # type: ignore[union-attr]
    assert summary(tmp)["exit"] == "completed"


@pytest.mark.nightly
def test_the_end_of_rays_head_is_told(tmp: Path) -> None:
    with driver("sleeping", tmp) as process:
        processes = psutil.Process(process.pid).children(recursive=True)
        part(process, "gcs_server").kill()
        assert process.wait(SECONDS) == 1
        assert "the run failed: the Ray session is lost: its process" in process.stderr.read()  # type: ignore[union-attr]
    assert "(gcs_server) died" in summary(tmp)["exit"]
    assert gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_stopped_process_of_rays_is_noticed(tmp: Path, name: str) -> None:
    with driver("sleeping", tmp, "limits.silence=2") as process:
        processes = psutil.Process(process.pid).children(recursive=True)
        part(process, name).suspend()
        assert process.wait(SECONDS) == 1
    assert f"({name}) has been stopped, as by SIGSTOP, for 2 s (limits.silence)" in summary(tmp)["exit"]
    assert gone(processes)


@pytest.mark.slow
def test_a_stopped_rank_is_noticed(tmp: Path) -> None:
    with driver("sleeping", tmp, "limits.silence=3") as process:
        processes = psutil.Process(process.pid).children(recursive=True)
        (rank,) = [child for child in processes if "Adder" in " ".join(child.cmdline())]
        rank.suspend()
        assert process.wait(SECONDS) == 1
        said = process.stderr.read()  # type: ignore[union-attr]
    assert "actor_train rank 0 failed in sleep: nothing was heard of its process for 3 s (limits.silence)" in said
    assert f"its process {rank.pid} is stopped, as by SIGSTOP, and can say nothing" in said
    assert "actor_train rank 0" in summary(tmp)["exit"] and gone(processes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_got_lost_leaves_nobody_deaf() -> None:
    """Python drops an exception that is raised in a __del__."""

    class Dropping:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with Interruption().handled():
        Dropping()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_killed_run_has_its_summary_and_its_picture(tmp_path: Path) -> None:
    with driver("stepping", tmp_path) as process:
        picture = tmp_path / "runs" / "latest" / "curves.png"
        deadline = time.monotonic() + SECONDS
        while not picture.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert (summary(tmp_path)["exit"], summary(tmp_path)["steps"]) == ("running", 1)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.read_bytes().endswith(b"IEND\xaeB`\x82")


def test_the_end_of_a_run_is_recorded_on_a_full_disk(tmp: Path) -> None:
    with small_disk(tmp / "runs", "8m"), driver("filling", tmp) as process:
        assert process.wait(SECONDS) == 1
        assert "could not be recorded" not in process.stderr.read()  # type: ignore[union-attr]
        assert "No space left on device" in summary(tmp)["exit"]


@pytest.mark.usefixtures("signals_arrive")
def test_a_first_sigterm_waits_until_what_is_saved_is_whole() -> None:
    interruption = Interruption(saves=True)
    with interruption.handled(), interruption.saving():
        signal.raise_signal(signal.SIGTERM)
        with WATCHDOG.uninterrupted():
            WATCHDOG.check()
        assert 59 < WATCHDOG.preempted_for(60.0) <= 60 and WATCHDOG.preempted_for(1e-9) == 5.0
        with pytest.raises(Preempted):
            WATCHDOG.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    WATCHDOG.check()
    for saves, number in ((False, signal.SIGTERM), (True, signal.SIGINT)):
        other = Interruption(saves)
        with other.handled(), other.saving(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    with interruption.handled(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)  # before training there is nothing to save


@pytest.mark.parametrize(("signal_", "code"), [(KeyboardInterrupt(), 130), (Preempted(), 75), (PreemptedUnsaved(), 75)])
def test_whoever_sent_sigterm_may_start_the_run_again(tmp_path: Path, signal_: BaseException, code: int) -> None:
    ends: list[str] = []
    journal: Any = SimpleNamespace(
        folder=tmp_path, checkpoints=tmp_path, close=ends.append, console=SimpleNamespace(message=lambda _: None)
    )
    end = RunEnd(journal, Interruption())
    with end.recorded():
        raise signal_
    assert (end.code, ends) == (code, ["interrupted"])


def test_a_shortage_is_told_beside_the_failure_and_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends: list[str] = []
    journal: Any = SimpleNamespace(
        folder=tmp_path, checkpoints=tmp_path, close=ends.append, console=SimpleNamespace(message=lambda _: pytest.fail("no checkpoint"))
    )
    for error in (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ValueError("another")):
        with RunEnd(journal, Interruption()).recorded():
            raise error
    first, second = capsys.readouterr().err.split("the run failed: ")[1:]
    assert "raise the limit (ulimit -n 65536)" in first and "ulimit" not in second
    assert "Too many open files. Processes may open too few files here: raise" in ends[0] and ends[1] == "failed: another"
