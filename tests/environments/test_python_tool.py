"""Interpreters of episodes, in real sandboxes."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest
from environments.tool_play import answer, begin, loaded, played, player_of

from roll_lite.config.schema.environments import PythonToolConfig
from roll_lite.environments import python_tool
from roll_lite.environments.episode import Ask, Cancel, Ended, Failed
from roll_lite.environments.python_tool import Interpreter, PythonTool
from roll_lite.sandbox.pool import Sandbox

LIMIT_S = 1.0
LOST = "The interpreter has ended (limits: 1 s a call, 200 MB). Variables and changed files are lost; the next call starts a new one."
STUBBORN = "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass"


MADE: Counter[int] = Counter()
"""Interpreters made, by their settings."""


class Counted(Interpreter):
    def __init__(self, settings: PythonToolConfig) -> None:
        super().__init__(settings)
        MADE[id(settings)] += 1


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonTool]:
    folder = tmp_path_factory.mktemp("importable")
    folder.chmod(0o755)
    (folder / "helper.py").write_text("answer = 42\n")
    given: dict[str, Any] = {"memory_mb": 200, "files": "files", "python_path": [folder]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_tool, "Interpreter", Counted)
        try:
            [tool] = loaded(PythonToolConfig(name="python", timeout_s=LIMIT_S, **given))
        except ValueError as refusal:
            pytest.skip(str(refusal))
        assert isinstance(tool, PythonTool)
        yield tool
    for one in tool._free:
        one.sandbox.close()


def code(*pieces: str) -> list[Any]:
    """Response with a call for each piece."""
    return [["python", {"code": piece}] for piece in pieces]


async def run(tool: PythonTool, *pieces: str, files: dict[str, str | None] | None = None) -> tuple[list[str], dict[str, float]]:
    """Run one piece after the other in an episode; returns the results, and the episode's metrics."""
    shown, end = await played(player_of([tool]), [*(code(piece) for piece in pieces), "Done."], {"files": files})
    assert isinstance(end, Ended), end
    return [one for [one] in shown], end.record.metrics


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def sandboxes(tool: PythonTool) -> set[int]:
    """Process ids of all sandboxes, once all are free. Then no programs run in them."""
    await until(lambda: len(tool._free) == MADE[id(tool._settings)])
    roots = [psutil.Process(one.sandbox._process.pid) for one in tool._free if one.sandbox._process is not None]
    assert sum(len(root.children(recursive=True)) for root in roots) == len(roots)  # each has one that starts the programs
    return {root.pid for root in roots}


def test_description(tool: PythonTool) -> None:
    [schema] = tool.schemas
    assert schema["function"]["name"] == "python"
    assert list(schema["function"]["parameters"]["properties"]) == ["code"] == schema["function"]["parameters"]["required"]


async def test_answers_like_an_interactive_interpreter(tool: PythonTool) -> None:
    pieces = {
        "x = 6\nx * 7": "42",
        "print('hello')\nx": "hello\n6",
        "import helper\nhelper.answer": "42",
        "def double(n):\n    return 2 * n": "(no output)",
        "double(x); double('a')": "'aa'",
        "import os\nif os.system('echo below >&2') == 0:\n    print('and here')": "below\nand here",
        "print('no line end', end='')": "no line end",
        "import sys; sys.exit()": "(no output)",
        "x": "6",
        "": "(no output)",
    }
    shown, metrics = await run(tool, *pieces)
    assert shown == list(pieces.values())
    assert metrics["tool_errors"] == 0


async def test_calls_of_one_response_run_in_order(tool: PythonTool) -> None:
    [shown], _ = await played(player_of([tool]), [code("n = 1", *["n += n; n"] * 9), "Done."], {"files": None})
    assert shown[1:] == [str(2**power) for power in range(1, 10)]


async def test_calls_that_a_response_leaves_no_time_for_are_refused(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt would fail, and the model could have its own response repeated."""
    monkeypatch.setattr(tool, "_longest_wait_s", 0.5)
    wait = "import time; time.sleep(0.7)"
    [shown], end = await played(player_of([tool]), [code(wait, wait, "1"), "Done."], {"files": None})
    refused = [re.sub(r"\d+ s", "1 s", one) for one in shown[1:]]  # longer on a busy machine
    assert shown[0] == "(no output)"
    assert refused == ["This call was not run: the earlier calls of the response took 1 s."] * 2
    assert isinstance(end, Ended) and end.record.metrics["tool_errors"] == 2


async def test_errors(tool: PythonTool) -> None:
    network = "import socket\nsocket.create_connection(('127.0.0.1', 22))"
    shown, metrics = await run(tool, "a = 1\nprint(a)\na / 0", "for", "a", network, "input()", "open('/etc/x', 'w')")
    assert shown[0].startswith('1\nTraceback (most recent call last):\n  File "<call 1>", line 3, in <module>\n    a / 0\n')
    assert shown[0].endswith("ZeroDivisionError: division by zero")
    assert shown[1].startswith('File "<call 2>", line 1\n    for\n') or shown[1].startswith('  File "<call 2>", line 1\n    for\n')
    assert shown[2] == "1", "what was done before an error stays"
    assert "PermissionError" in shown[3] and "EOFError" in shown[4] and "Error: [Errno" in shown[5]
    assert metrics["tool_errors"] == 5
    [wrong], _ = await played(player_of([tool]), [[["python", {"source": "1"}], ["python", {}]], "Done."], {"files": {}})
    assert "unexpected keyword argument 'source'" in wrong[0] and "missing" in wrong[1]


async def test_files_of_the_episode(tool: PythonTool) -> None:
    read = "import os\nprint(sorted(os.listdir('.')), open('data/a.csv').read(), open('é \"').read())"
    shown, _ = await run(tool, read, "open('new', 'w').write('x')", files={"data/a.csv": "1,2{}\n", 'é "': "\\n'", "other": None})
    assert shown[0] == "['data', 'é \"'] 1,2{}\n \\n'"
    shown, _ = await run(tool, "import os; os.listdir('.')", files=None)
    assert shown == ["[]"], "a new episode has a new folder"
    _, end = await played(player_of([tool]), [code("1")], {"files": "text"})
    assert isinstance(end, Failed) and "column 'files': must be a mapping of file names to texts" in end.cause


async def test_slow_code_is_interrupted_and_keeps_its_state(tool: PythonTool) -> None:
    shown, _ = await run(tool, "x = 1", "x = 2\nprint('begun')\nwhile True: pass", "x")
    assert shown[1].startswith("begun\nTraceback") and shown[1].endswith("KeyboardInterrupt: the time limit is 1 s")
    assert shown[2] == "2"


async def test_an_interpreter_that_has_ended_is_started_again(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "GRACE_S", 0.5)
    shown, metrics = await run(tool, "x = 1", STUBBORN, "import os\n'x' in globals(), os.listdir()", "os._exit(3)", "1", files={"f": ""})
    assert shown == ["(no output)", LOST, "(False, ['f'])", LOST, "1"]
    assert metrics["tool_errors"] == 2


async def test_memory_is_limited(tool: PythonTool) -> None:
    together = "import os, time\nos.fork() or os.fork()\nb = b'x' * 150_000_000\ntime.sleep(0.9)"
    shown, _ = await run(tool, "b = bytearray(10 ** 9)", "1", together, "2")
    assert shown[0].endswith("MemoryError") and shown[1] == "1"
    assert shown[2:] == [LOST, "2"]


async def test_the_end_of_a_long_output_is_read(tool: PythonTool) -> None:
    shown, _ = await run(tool, "print('x' * 3_000_000)\n1 / 0", "1")
    assert len(shown[0]) == 8000 and shown[0].endswith("division by zero") and shown[1] == "1"


async def test_a_fork_of_the_code_does_not_answer(tool: PythonTool) -> None:
    shown, _ = await run(tool, "import os, time\nif os.fork() == 0:\n    time.sleep(0.1)\nelse:\n    os.wait()", "5", "6")
    assert shown[1:] == ["5", "6"]


async def test_nothing_runs_between_calls(tool: PythonTool) -> None:
    count = "import threading, time\nn = 0\ndef count():\n    global n\n    while True: n += 1; time.sleep(0.001)\n"
    async with tool.opened(begin({"files": None}).task) as call:
        ask = partial(call, "python")
        first = int(await ask({"code": f"{count}threading.Thread(target=count, daemon=True).start()\ntime.sleep(0.1)\nn"}))
        await asyncio.sleep(0.5)
        assert 0 < first <= int(await ask({"code": "n"})) < first + 200
        assert int(await ask({"code": "time.sleep(0.1); n"})) > first


async def test_episodes_run_side_by_side_and_leave_nothing(tool: PythonTool) -> None:
    together = await asyncio.gather(*(run(tool, f"x = {n}\nimport time; time.sleep(0.3)", "x") for n in range(3)))
    assert [shown[1] for shown, _ in together] == ["0", "1", "2"]
    before = await sandboxes(tool)
    assert len(before) >= 3
    await run(tool, "1")
    assert await sandboxes(tool) == before, "sandboxes are used again"


async def test_a_cancelled_episode_ends_its_code(tool: PythonTool) -> None:
    await run(tool, "1")
    before = await sandboxes(tool)
    player = player_of([tool])
    player.tell([begin({"files": None})])
    [asked] = await player.events(10.0)
    assert isinstance(asked, Ask)
    player.tell([answer(code(STUBBORN))])
    await until(lambda: len(tool._free) < len(before))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    player.tell([Cancel(1)])
    await until(lambda: len(tool._free) == len(before))
    assert time.monotonic() - began < LIMIT_S
    assert await sandboxes(tool) == before


def test_a_machine_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "Sandbox", partial(Sandbox, "none"))
    with pytest.raises(ValueError, match="tools.0: tool python: this machine cannot isolate programs.*allow_unprotected: true"):
        loaded(PythonToolConfig(name="python"))
    [tool] = loaded(PythonToolConfig(name="python", allow_unprotected=True))
    assert isinstance(tool, PythonTool)
    tool._free[0].sandbox.close()
