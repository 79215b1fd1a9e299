"""Tools of real MCP servers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from environments.tool_play import answer, begin, loaded, played, player_of

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.environments import McpToolConfig
from roll_lite.environments.check import check_environments
from roll_lite.environments.episode import Cancel, Ended, Failed
from roll_lite.environments.tools import Tools
from roll_lite.files import CONFIGS

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow  # a server takes seconds to import its libraries
SERVER = Path(__file__).parent / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER), "stdio"]


def settings(**given: Any) -> McpToolConfig:
    return McpToolConfig(name="mcp", **given)


@pytest.fixture(scope="module")
def tools() -> list[Tools]:
    return loaded(settings(command=COMMAND, env={"UNIT": "apples"}))


def servers() -> list[psutil.Process]:
    children = psutil.process_iter(["ppid", "cmdline"])  # of a process that has just ended, the command line is empty
    return [one for one in children if one.info["ppid"] == os.getpid() and str(SERVER) in " ".join(one.info["cmdline"] or ())]


def test_tools_are_described(tools: list[Tools]) -> None:
    by_name = {schema["function"]["name"]: schema["function"] for schema in tools[0].schemas}
    assert list(by_name) == ["add", "divide", "picture", "wait", "die"]
    assert "Add to the total." in by_name["add"]["description"]
    assert by_name["add"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert by_name["add"]["parameters"]["required"] == ["number"]


async def test_each_episode_has_a_server_of_its_own(tools: list[Tools]) -> None:
    player = player_of(tools)
    calls = [["divide", {"number": 0}], ["add", {"number": "many"}], ["picture", {}], ["add", {"number": 3}]]
    shown, end = await played(player, [[["add", {"number": 2}]], calls, "Done."])
    assert shown[0] == ["total 2, apples"]
    assert "divide" in shown[1][0] and "valid integer" in shown[1][1]
    assert shown[1][2:] == ["as drawn:\n(image)", "total 5, apples"]
    assert isinstance(end, Ended) and end.record.metrics["tool_errors"] == 2 and not servers()
    _, end = await played(player, [[["add", {"number": 2}]], [["die", {}]]])
    assert isinstance(end, Failed) and "ToolLost: MCP server" in end.cause and "Connection closed" in end.cause
    await played(player_of(tools, max_turns=1), [[["add", {"number": 1}]]])
    assert not servers()


async def test_a_cancelled_or_late_call_ends_the_server(tools: list[Tools]) -> None:
    _, end = await played(player_of(tools, timeout_s=6.0), [[["wait", {}]]])
    assert isinstance(end, Failed) and "turn_timeout_s" in end.cause and not servers()
    player = player_of(tools)
    player.tell([begin({})])
    assert len(await player.events(10.0)) == 1
    player.tell([answer([["wait", {}]])])
    async with asyncio.timeout(20):
        while not servers():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        player.tell([Cancel(1)])
        while servers():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"command": COMMAND, "tools": ["add", "divid"]}, "tools.0: tools: the server has no tool 'divid'; did you mean 'divide'"),
        ({"command": ["/no/such/program"]}, "tools.0: MCP server .*no/such/program.*No such file"),
        ({"command": [sys.executable, "-c", "pass"]}, "tools.0: MCP server .*losed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "tools.0: MCP server http.*"),
    ],
)
def test_servers_that_do_not_answer(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loaded(settings(**given))


UNKNOWN = {"name": "mcp", "command": COMMAND, "tools": ["add", "divid"]}
SILENT = {"name": "mcp", "command": [sys.executable, "-c", "import time; time.sleep(60)"]}
ALL = {"name": "mcp", "command": COMMAND}


@pytest.mark.parametrize(
    ("tools", "limit", "says"),
    [
        ([UNKNOWN], 60, "tools.0: tools: the server has no tool 'divid'; did you mean 'divide'"),
        ([SILENT], 3, r"tools.0: was not ready within 3 s \(start_timeout_s\)"),
        ([ALL, ALL], 60, "environment.tools: the model cannot tell tools of one name apart: add, divide, picture, wait, die, add"),
    ],
    ids=["unknown", "silent", "twice"],
)
def test_check_asks_the_server_for_its_tools(tools: list[dict[str, Any]], limit: int, says: str) -> None:
    calculator = "domains.calculator.environment"
    overrides = [f"{calculator}.tools={json.dumps(tools)}", f"{calculator}.start_timeout_s={limit}"]
    with pytest.raises(ConfigError, match=says) as refused:
        load_config("tiny_calculator", CONFIGS, overrides, further=[check_environments])
    assert len(refused.value.problems) == 1


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    try:
        for _ in range(200):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


async def test_a_server_over_http(url: str) -> None:
    tools = await asyncio.to_thread(loaded, settings(url=url, tools=["add", "die"]))
    assert [schema["function"]["name"] for schema in tools[0].schemas] == ["add", "die"]
    player = player_of(tools)
    shown, _ = await played(player, [[["add", {"number": 2}]], [["add", {"number": 2}]], "Done."])
    assert shown == [["total 2, "], ["total 4, "]]
    _, end = await played(player, [[["die", {}]]])
    assert isinstance(end, Failed) and "ToolLost: MCP server http" in end.cause
