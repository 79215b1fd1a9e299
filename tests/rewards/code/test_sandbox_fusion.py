"""SandboxFusion as the back end of the reward `code`: against a server that does what its `/run_code` does with a Python program."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code import backends as code_backends
from roll_lite.rewards.code.backends import RemoteBackend
from roll_lite.rewards.code.reward import CodeReward

OF_THE_IMAGE = {"PATH": "/usr/bin:/bin:/opt/compilers", "JAVA_HOME": "/opt/java"}


class Fusion(BaseHTTPRequestHandler):
    """A folder with the files, the code as a program in it, the wanted files back."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["language"] == "python" and self.path == "/run_code"
        answer = json.dumps(self._run(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _run(self, asked: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            for name, content in asked["files"].items():
                (place / name).write_bytes(base64.b64decode(content))
            (place / "main.py").write_text(asked["code"])
            if (place / "job.json").read_text().count("sandbox error"):
                return {"status": "SandboxError", "message": "no executor is free", "run_result": None, "files": {}}
            command = [sys.executable, "main.py"]
            run: dict[str, Any] = {"status": "Finished", "stdout": "", "stderr": "", "return_code": None}
            try:
                ended = subprocess.run(command, cwd=folder, env=OF_THE_IMAGE, capture_output=True, timeout=asked["run_timeout"])
                run |= {"return_code": ended.returncode, "stdout": ended.stdout.decode(), "stderr": ended.stderr.decode()}
            except subprocess.TimeoutExpired:
                run["status"] = "TimeLimitExceeded"
            found = {one: base64.b64encode((place / one).read_bytes()).decode() for one in asked["fetch_files"] if (place / one).exists()}
            return {"status": "Success" if run["return_code"] == 0 else "Failed", "message": "", "run_result": run, "files": found}

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def backend() -> Iterator[RemoteBackend]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield RemoteBackend(name="sandbox_fusion", url=f"http://127.0.0.1:{server.server_port}/run_code", retries=0)
    server.shutdown()
    server.server_close()
    code_backends.backend_of.cache_clear()


def result(backend: RemoteBackend, response: str, answer: Any, columns: dict[str, Any] | None = None, **args: Any) -> Score | RewardFailed:
    [score] = CodeReward(backend=backend, **args)([RewardInput("code", "prompt", response, answer, columns or {}, "stop")])
    return score


SUM = "def f(x): return sum(x)"
CALLS = {"fn_name": "f", "inputs": [[[1, 2]], [[]]], "outputs": [3, 0]}
STDIO = [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "-1\n", "stdout": "-2\n"}]
C_PROGRAM = '#include <stdio.h>\nint main() { int n; scanf("%d", &n); printf("%d\\n", 2 * n); }'


@pytest.mark.parametrize(
    ("right", "wrong", "answer", "args"),
    [
        ("print(int(input()) * 2)", "print(8)", STDIO, {}),
        (SUM, "def f(x): return 3", CALLS, {}),
        (SUM, "def f(x): return 3", "assert f([1, 2]) == 3\nassert f([]) == 0", {}),
        ("def f(x): x.sort()", "def f(x): pass", "x = [2, 1]\nf(x)\nassert x == [1, 2]", {}),
        ("sorted([2, 1])", "[2, 1]", [1, 2], {"mode": "expression"}),
        ("read n; echo $((n * 2))", "echo 8", STDIO, {"languages": ["bash"]}),
        pytest.param(
            C_PROGRAM,
            C_PROGRAM.replace("2 *", "3 *"),
            STDIO,
            {"languages": ["c"], "test_s": 5.0, "total_s": 30.0},
            marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler"),
        ),
    ],
)
def test_every_form_of_tests(backend: RemoteBackend, right: str, wrong: str, answer: Any, args: dict[str, Any]) -> None:
    good, bad = result(backend, right, answer, **args), result(backend, wrong, answer, **args)
    assert isinstance(good, Score) and isinstance(bad, Score), (good, bad)
    assert (good.value, bad.value) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("while True: pass", "time limit: too much computing"),
        ("import time\ntime.sleep(60)", "time limit: did not end"),
        ("while True: print('x' * 10000)", "limit"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("import os, signal\nos.kill(0, signal.SIGKILL)", "exit status -9"),
        ("import os\nprint(os.path.exists('job.json') or os.path.exists('../job.json'))", "printed 'False"),
    ],
)
def test_limits(backend: RemoteBackend, program: str, verdict: str) -> None:
    score = result(backend, program, STDIO, test_s=1.0, wall_s=15.0 if "pass" in program else 3.0)
    assert isinstance(score, Score) and score.value == 0.0
    assert verdict in str(score.details["verdict"])


def test_programs_find_what_the_image_has_installed(backend: RemoteBackend) -> None:
    program = "import os\nprint(os.environ['PATH'], os.environ['JAVA_HOME'])"
    score = result(backend, program, [{"stdin": "", "stdout": f"{OF_THE_IMAGE['PATH']} {OF_THE_IMAGE['JAVA_HOME']}"}])
    assert isinstance(score, Score) and score.value == 1.0, score


def test_what_goes_wrong_there_is_a_failure(backend: RemoteBackend) -> None:
    failure = result(backend, "print('sandbox error')", STDIO)
    assert isinstance(failure, RewardFailed)
    assert failure.cause.endswith("SandboxFusion left no outcome: no executor is free")


def test_a_program_that_ends_its_sandbox_is_wrong(backend: RemoteBackend) -> None:
    """The response alone brings it about; another program runs there."""
    for program, tests in (("{}", STDIO), ("{}\ndef f(x): return x", "assert f(1) == 1")):
        score = result(backend, program.format("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"), tests)
        assert isinstance(score, Score) and score.value == 0.0 and score.details["verdict"] == "test 1: ended its sandbox", score


LOOKS = """
import gc, sys
frame, seen = sys._getframe(), []
while frame:
    seen.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
seen.append(repr([one for one in gc.get_objects() if type(one) in (dict, list, tuple)]))
found = int(sys.argv[0] != "main.py" or any(''.join(reversed("hsifdrows")) in one for one in seen))
"""


def test_a_programs_interpreter_never_held_its_tests(backend: RemoteBackend) -> None:
    score = result(backend, f"{LOOKS}\ndef f(x): return found", "assert f('a') == 0  # swordfish")
    assert isinstance(score, Score) and score.value == 1.0, score
    score = result(
        backend, f"{LOOKS}\nprint(found)", [{"stdin": "", "stdout": "0"}, {"stdin": "", "stdout": "swordfish"}], score="fraction"
    )
    assert isinstance(score, Score) and score.value == 0.5, score
