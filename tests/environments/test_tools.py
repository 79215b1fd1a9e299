"""Episodes with tools: opening and closing, mistakes, long results."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from environments.tool_play import loaded, played, player_of

from roll_lite.config.schema.environments import FunctionToolConfig
from roll_lite.data.samples import FinishReason
from roll_lite.environments import tools
from roll_lite.environments.base import Task
from roll_lite.environments.episode import Calls, Ended, Failed
from roll_lite.environments.tools import LEFT_OUT, Call, FunctionTool, ToolError, ToolLost


class Counter:
    """Tools `add` and `say` with a state per episode."""

    schemas = tuple({"type": "function", "function": {"name": name}} for name in ("add", "say"))

    def __init__(self) -> None:
        self.log: list[str] = []

    @asynccontextmanager
    async def opened(self, task: Task) -> AsyncIterator[Call]:
        self.log.append(f"open {task.columns['start']}")
        total = task.columns["start"]

        async def call(name: str, arguments: dict[str, Any]) -> Any:
            nonlocal total
            if name == "say":
                raise {"wrong": ToolError("That is wrong."), "lost": ToolLost("the server is gone")}[arguments["what"]]
            total += arguments["number"]
            return {"total": total}

        try:
            yield call
        finally:
            self.log.append(f"close {total}")


def add(number: int) -> list[Any]:
    return [["add", {"number": number}]]


async def test_arguments_may_have_any_name() -> None:
    def plot(function: str, self: str) -> str:
        """Plot.

        Args:
            function: What to plot.
            self: Whose.
        """
        return f"{function} of {self}"

    shown, _ = await played(player_of([FunctionTool(plot, Calls())]), [[["plot", {"function": "sin", "self": "x"}]], "Done."])
    assert shown == [["sin of x"]]


async def test_tools_are_opened_at_the_first_call_and_closed_at_the_end() -> None:
    counter, idle = Counter(), Counter()
    idle.schemas = ({"type": "function", "function": {"name": "unused"}},)
    player = player_of([counter, idle])
    shown, end = await played(player, [add(1), [*add(2), *add(4)], "Done."], {"start": 10})
    assert shown == [['{"total": 11}'], ['{"total": 13}', '{"total": 17}']]
    assert isinstance(end, Ended) and end.record.metrics["tool_calls"] == 3 and end.record.metrics["tool_errors"] == 0
    await played(player, ["Nothing to do."], {"start": 0})
    assert (counter.log, idle.log) == (["open 10", "close 17"], [])
    shown, _ = await played(player, [add(1), "Done."], {"start": 0})
    assert shown == [['{"total": 1}']], "another episode, another state"


async def test_errors_are_told_to_the_model() -> None:
    player = player_of([Counter()])
    calls = [["say", {"what": "wrong"}], ["say", {"what": "else"}], ["sub", {}], ["add", {"number": 1}]]
    shown, end = await played(player, [calls, "Done."], {"start": 0})
    assert shown == [["That is wrong.", "Error: KeyError: 'else'", "Error: there is no tool 'sub'; there are add, say", '{"total": 1}']]
    assert isinstance(end, Ended) and end.record.metrics["tool_errors"] == 3


async def test_malformed_calls_are_answered_and_counted() -> None:
    counter = Counter()
    shown, end = await played(player_of([counter]), [[["add", "{number"], *add(3)], "Done."], {"start": 0})
    assert shown == [["Error: the arguments are no JSON object", '{"total": 3}']]
    assert isinstance(end, Ended) and (end.record.metrics["tool_calls"], end.record.metrics["tool_errors"]) == (2, 1)


async def test_a_lost_tool_fails_the_attempt() -> None:
    counter = Counter()
    _, end = await played(player_of([counter]), [[["say", {"what": "lost"}]]], {"start": 0})
    assert isinstance(end, Failed) and "ToolLost: the server is gone" in end.cause
    assert counter.log == ["open 0", "close 0"]


async def test_tools_are_closed_when_a_limit_ends_the_episode() -> None:
    counter = Counter()
    _, end = await played(player_of([counter], max_turns=2), [add(1), add(2)], {"start": 0})
    assert isinstance(end, Ended) and end.finish_reason is FinishReason.MAX_TURNS
    assert counter.log == ["open 0", "close 3"]


def letters(count: int) -> str:
    """Return letters.

    Args:
        count: How many.
    """
    return "a" + "b" * (count - 2) + "c"


async def test_long_results_lose_their_middle() -> None:
    shown_letters = loaded(FunctionToolConfig(name=f"{__name__}.letters"))
    [[short, whole]], _ = await played(
        player_of(shown_letters, max_chars=300), [[["letters", {"count": 10_000}], ["letters", {"count": 300}]], "Done."]
    )
    assert len(short) == 300 and short.startswith("abb") and short.endswith("bbc") and LEFT_OUT in short
    assert whole == letters(300)


@pytest.mark.parametrize("name", ["mine.nothing", "json.dumps"])
def test_functions_that_cannot_be_tools(name: str) -> None:
    with pytest.raises(ValueError, match=f"tools.0: .*{name.rpartition('.')[2]}"):
        loaded(FunctionToolConfig(name=name))


async def test_an_async_tool_that_leaves_python_is_answered() -> None:
    """SystemExit of a task would end the event loop, and all episodes of the worker."""

    async def leave(code: int) -> str:
        """Leave.

        Args:
            code: Number.
        """
        sys.exit(code)

    shown, end = await played(player_of([FunctionTool(leave, Calls())]), [[["leave", {"code": 3}]], "Done."])
    assert shown == [["Error: SystemExit: 3"]] and isinstance(end, Ended)


async def test_sync_calls_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_THREADS", 2)
    running, most = threading.Semaphore(0), [0]

    def wait(number: int) -> int:
        """Wait.

        Args:
            number: Number.
        """
        running.release()
        time.sleep(0.05)
        most.append(running._value)
        running.acquire()
        return number

    shown, _ = await played(player_of([FunctionTool(wait, Calls())]), [[["wait", {"number": number}] for number in range(9)], "Done."])
    assert shown == [[str(number) for number in range(9)]] and max(most) == 2
