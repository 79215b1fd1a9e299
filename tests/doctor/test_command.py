"""`roll-lite doctor` from outside: what it prints, its exit code, what a failed run leaves. Slow: on this machine, with its engines."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_lite.cli import main
from roll_lite.doctor import command
from roll_lite.doctor.command import run_tiny
from roll_lite.doctor.packages import Diagnosis


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for the command alone. Its path is short, as Ray's sockets need it."""
    path = Path(tempfile.mkdtemp(prefix="d-"))
    yield path
    shutil.rmtree(path)


def doctor(folder: Path, *options: str, files: int | None = None, first_on_path: Path | str = "") -> subprocess.CompletedProcess[str]:
    limit = None if files is None else (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "roll_lite.cli", "doctor", *options],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(first_on_path), *sys.path]), "TMPDIR": str(folder)},
        check=False,
    )


def left_behind(folder: Path) -> list[Path]:
    return [path for pattern in ("doctor-*", "rl-*") for path in folder.glob(pattern)]


def test_a_line_for_each_check_and_a_remedy_below(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Diagnosis("a", "1"),
        Diagnosis("b", "2", "change it", "warning"),
        Diagnosis("c", "3", "or that"),
        Diagnosis("d", "4", node="n"),
    ]
    monkeypatch.setattr(command, "_examine", lambda _: iter(found))
    assert main(["doctor"]) == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "a", "1"],
        ["warning", "b", "2"],
        ["->", "change", "it"],
        ["fault", "c", "3"],
        ["->", "or", "that"],
        [],
        ["4", "checks:", "1", "faults,", "1", "warnings"],
    ]
    monkeypatch.setattr(command, "_examine", lambda _: iter(found[:2]))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {"check": "b", "value": "2", "remedy": "change it", "status": "warning", "node": ""}


@pytest.mark.parametrize("name", ["torch", "ray"])
def test_a_package_that_cannot_be_imported_is_a_fault(name: str, folder: Path) -> None:
    (folder / f"{name}.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    done = doctor(folder, first_on_path=folder)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "fault    imports          libcudart.so: cannot open shared object file" in done.stdout


@pytest.mark.parametrize("options", [["--nodes"], ["--nodes", "--json"]])
def test_a_cluster_that_is_not_there(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options, "--address", "127.0.0.1:1"]) == 1
    told = capsys.readouterr().out
    assert "no Ray cluster answers at 127.0.0.1:1" in told and "roll-lite docs multi_node" in told and "Traceback" not in told


def test_a_run_that_fails_is_told_in_its_own_words_and_its_folder_is_kept() -> None:
    found = run_tiny("smoke", "vllm", None, "steps=-1")
    folder = Path(found.remedy.rpartition(" ")[2])
    try:
        assert found.status == "fault" and found.value.startswith("the run ended with code 2\n") and "steps = -1" in found.value
        assert (folder / "output.txt").is_file()
    finally:
        shutil.rmtree(folder)


def test_an_interrupted_run_ends_the_command_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "run_forwarding_signals", lambda *_, **__: 130)
    with pytest.raises(KeyboardInterrupt):
        run_tiny("smoke", "vllm", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_fault_of_this_machine_is_the_exit_code(folder: Path) -> None:
    done = doctor(folder, files=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fault    open files       400 at most\n" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert "own cluster starts in" in done.stdout and not left_behind(folder)


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_two_steps_of_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = run_tiny("smoke", "vllm", None, "steps=2")
    assert found.status == "ok" and "s for step 2; engine and trainer agree: log-probs differ by " in found.value, found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_two_steps_with_each_engine(folder: Path) -> None:
    done = doctor(folder, "--smoke", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["check"]: one for one in json.loads(done.stdout)}
    for engine in ("vllm", "sglang"):
        if found[engine]["value"] != "not installed":
            assert "s for step 2; engine and trainer agree: log-probs differ by " in found[f"smoke {engine}"]["value"]
    assert not left_behind(folder)


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_engines_that_start(folder: Path) -> None:
    done = doctor(folder, "--engines")
    assert done.returncode == 0 and "start of " in done.stdout and "agree" not in done.stdout, done.stdout + done.stderr
