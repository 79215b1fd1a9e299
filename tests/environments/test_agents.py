"""Agents as programs and functions, from the first request to the end of their episode."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
import ray
from support_endpoint import WEATHER

from roll_lite.config.schema.domains import TOOLS_NEED_CHAT, DomainConfig
from roll_lite.data.samples import FinishReason
from roll_lite.data.templates import load_tokenizer
from roll_lite.environments.agents import OUTPUT_BYTES, Agent, Endpoint, command_agent, play_agent
from roll_lite.environments.base import Message, Task
from roll_lite.environments.build import renderers_of
from roll_lite.environments.episode import Answer, Ask, Begin, Calls, Ended, Failed, Limits, Player
from roll_lite.scheduler.ledger import FAILED, group_line
from roll_lite.workers.environment import EnvironmentWorker
from tests.environments.test_episode import Characters, encoded

ROOT = Path(__file__).resolve().parents[2]
TASK = Task([{"role": "user", "content": "Add."}], "7", {"level": 2}, 5)
PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)) as reply:
        return json.load(reply)["choices"][0]["message"]
"""


def renderer_of(tools: Sequence[dict[str, Any]]) -> Characters:
    return Characters()


async def played(
    agent: Agent,
    *responses: str,
    gives_reward: bool = True,
    delay: float = 0.0,
    renderer_of: Any = renderer_of,
    own: Any = None,
    **limits: Any,
) -> tuple[list[Ask], Any]:
    """Play an episode with these responses, each after `delay`; returns the requests and the last event."""
    given = Limits(**{"max_turns": 9, "turn_timeout_s": 20.0, "max_prompt_tokens": 100} | limits)
    player = Player(play_agent(agent, "127.0.0.1", renderer_of, gives_reward), own or Characters(), given, Calls())
    player.tell([Begin(7, TASK, 100)])
    asks: list[Ask] = []
    answers = iter(responses)
    while True:
        for event in await player.events(30.0):
            if not isinstance(event, Ask):
                return asks, event
            asks.append(event)
            await asyncio.sleep(delay)
            player.tell([Answer(7, event.number, encoded(next(answers)))])


def program(tmp_path: Path, rest: str) -> Agent:
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM + rest, encoding="utf-8")
    return command_agent([sys.executable, str(file)])


async def test_a_program_talks_for_two_turns_and_prints_its_reward(tmp_path: Path) -> None:
    rest = """
first = ask(task["messages"])
second = ask([*task["messages"], first, {"role": "user", "content": "More."}])
print("noise")
print(0.5 if (first["content"], second["content"], task["columns"]) == ("3", "4", {"level": 2}) else 0)
"""
    asks, end = await played(program(tmp_path, rest), "3", "4")
    assert isinstance(end, Ended), end
    assert [(ask.number, ask.after) for ask in asks] == [(0, None), (1, 0)]
    assert (end.record.rewards, end.record.branches, end.record.metrics["rows"]) == ((0.0, 0.5), (), 1.0)
    assert [message["content"] for message in end.record.messages] == ["Add.", "3", "More.", "4"]


async def test_the_end_of_a_flood_of_output_is_kept(tmp_path: Path) -> None:
    rest = """
ask(task["messages"])
for file in (sys.stderr, sys.stdout):
    for _ in range(100):
        print("x" * 100_000, file=file)
print("y" * 1_000_000, end="z")
"""
    _, end = await played(program(tmp_path, rest), "3", gives_reward=False)
    assert isinstance(end, Ended) and end.record.answer == "y" * (OUTPUT_BYTES - 1) + "z"


async def test_an_answer_is_left_to_the_domains_reward(tmp_path: Path) -> None:
    _, end = await played(program(tmp_path, 'ask(task["messages"])\nprint("it is")\nprint("12")'), "3", gives_reward=False)
    assert (end.record.answer, end.record.rewards) == ("12", (0.0,))


async def test_a_number_is_no_answer() -> None:
    async def number(task: Task, endpoint: Endpoint) -> float:
        await post(endpoint, task.messages)
        return 0.5

    _, end = await played(number, "3", gives_reward=False)
    assert isinstance(end, Failed) and "the number 0.5, but the domain's `reward` scores texts" in end.cause


@pytest.mark.parametrize(
    ("rest", "cause"),
    [
        ('ask(task["messages"]); sys.exit("no luck")', "ended with code 1: no luck"),
        ('ask(task["messages"]); print("done")', "the agent's result is 'done'; expected a number"),
        ('ask(task["messages"])', "the agent's result is None; expected a number"),
        ("print(1)", "there is no response yet that could be rewarded"),
    ],
)
async def test_what_a_program_did_wrong_is_the_cause(rest: str, cause: str, tmp_path: Path) -> None:
    _, end = await played(program(tmp_path, rest), "3")
    assert isinstance(end, Failed) and cause in end.cause


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_program_that_never_ends_is_killed_with_its_children(tmp_path: Path) -> None:
    rest = """
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[0] + ".pids", "w").write(f"{os.getpid()} {child.pid}")
ask(task["messages"])
time.sleep(600)
"""
    _, end = await played(program(tmp_path, rest), "3", turn_timeout_s=3.0)
    assert isinstance(end, Failed) and "longer than 3 s" in end.cause
    pids = [int(pid) for pid in (tmp_path / "agent.py.pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(runs, pids)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def pipes() -> set[str]:
    return {name for name in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "pipe:" in name}


async def test_a_daemon_of_a_program_keeps_nothing_open(tmp_path: Path) -> None:
    rest = """
import subprocess, time
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[0] + ".pid", "w").write(str(daemon.pid))
ask(task["messages"])
"""
    before = pipes()
    _, end = await played(program(tmp_path, f"{rest}time.sleep(600)"), "3", turn_timeout_s=4.0)
    try:
        assert isinstance(end, Failed), end
        await asyncio.sleep(0.2)
        assert not [task for task in asyncio.all_tasks() if "_keep_end" in repr(task)] and pipes() <= before
    finally:
        psutil.Process(int((tmp_path / "agent.py.pid").read_text())).kill()


async def test_a_program_that_leaves_a_daemon_has_ended(tmp_path: Path) -> None:
    rest = """
import subprocess
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[0] + ".pid", "w").write(str(daemon.pid))
ask(task["messages"])
print(0.5)
"""
    try:
        _, end = await played(program(tmp_path, rest), "3", turn_timeout_s=30.0)
        assert isinstance(end, Ended) and end.record.rewards == (0.5,), end
    finally:
        psutil.Process(int((tmp_path / "agent.py.pid").read_text())).kill()


async def test_a_program_that_fails_at_a_limit_has_no_reward_but_trains(tmp_path: Path) -> None:
    asks, end = await played(program(tmp_path, 'while True: ask(task["messages"])'), "3", "4", max_turns=2)
    assert isinstance(end, Ended) and end.finish_reason is FinishReason.MAX_TURNS
    assert [ask.after for ask in asks] == [None, None] and end.record.rewards == (0.0, 0.0)
    assert [message["content"] for message in end.record.messages] == ["Add.", "4"]
    assert [[message["content"] for message in branch] for branch in end.record.branches] == [["Add.", "3"]]


async def test_raw_completions_and_stop_strings_where_the_template_opens_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Characters, "thinking", True)

    async def completes(task: Task, endpoint: Endpoint) -> bool:
        async with httpx2.AsyncClient(timeout=60.0) as client:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            reply = await client.post(f"{endpoint.base_url}/completions", headers=headers, json={"prompt": "2 + 2 ="})
            asked = {"model": "m", "messages": task.messages, "max_tokens": 9, "stop_sequences": ["x", "END"]}
            stopped = await client.post(f"{endpoint.base_url}/messages", headers=headers, json=asked)
        assert stopped.json()["stop_sequence"] == "END" and stopped.json()["content"][0]["text"] == "ok"
        return bool(reply.json()["choices"][0]["text"] == " 4")

    _, end = await played(completes, " 4", "hm</think>okENDx")
    assert isinstance(end, Ended) and end.record.correct is True


async def post(endpoint: Endpoint, messages: Sequence[Message], timeout: float = 30.0, **more: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(30.0, read=timeout)) as client:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        return await client.post(f"{endpoint.base_url}/chat/completions", headers=headers, json={"messages": list(messages), **more})


async def test_a_response_that_nobody_waited_for_trains() -> None:
    """Otherwise an agent that takes the first of several answers would prefer short ones."""

    async def impatient(task: Task, endpoint: Endpoint) -> float:
        with pytest.raises(httpx2.TimeoutException):
            await post(endpoint, task.messages, timeout=0.3)
        return 1.0

    asks, end = await played(impatient, "3", delay=1.0)
    assert isinstance(end, Ended) and len(asks) == 1
    assert (end.record.rewards, [message["content"] for message in end.record.messages]) == ((1.0,), ["Add.", "3"])


async def test_parallel_requests_are_rows_of_their_own() -> None:
    async def parallel(task: Task, endpoint: Endpoint) -> np.bool_:
        replies = await asyncio.gather(*(post(endpoint, [{"role": "user", "content": f"Add {number}."}]) for number in range(3)))
        return np.bool_(all(reply.json()["choices"][0]["message"]["content"] == "3" for reply in replies))

    asks, end = await played(parallel, "3", "3", "3")
    assert sorted(ask.number for ask in asks) == [0, 1, 2] and end.record.correct is True
    assert end.record.metrics["rows"] == 3 and len(end.record.branches) == 2


async def test_a_call_keeps_the_id_that_the_model_gave_it() -> None:
    """Mistral's results name the sampled id. An id that the episode has used before is replaced."""

    class CallsWithIds(Characters):
        def message(self, response_ids: Sequence[int]) -> Message:
            call = {"type": "function", "id": super().message(response_ids)["content"], "function": {"name": "add", "arguments": {}}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}

    async def ids(task: Task, endpoint: Endpoint) -> str:
        replies = [await post(endpoint, [{"role": "user", "content": f"Add {number}."}]) for number in range(3)]
        return " ".join(reply.json()["choices"][0]["message"]["tool_calls"][0]["id"] for reply in replies)

    _, end = await played(ids, "abcdefgh1", "abcdefgh2", "abcdefgh1", gives_reward=False, renderer_of=lambda _: CallsWithIds())
    assert end.record.answer == "abcdefgh1 abcdefgh2 call00000"


async def test_calls_are_counted_and_those_that_no_tool_can_answer() -> None:
    class Calls(Characters):
        def message(self, response_ids: Sequence[int]) -> Message:
            kinds: list[tuple[str, dict[str, str]]] = [("add", {}), ("add", {"problem": "not valid JSON", "text": "{"}), ("subtract", {})]
            calls = [{"type": "function", "id": "", "function": {"name": name, "arguments": {}}, **more} for name, more in kinds]
            return {"role": "assistant", "content": "", "tool_calls": calls}

    async def asks(task: Task, endpoint: Endpoint) -> float:
        await post(endpoint, task.messages, tools=[{"type": "function", "function": {"name": "add"}}])
        return 1.0

    _, end = await played(asks, "", renderer_of=lambda _: Calls())
    assert (end.record.metrics["tool_calls"], end.record.metrics["tool_errors"]) == (3, 2)


async def test_requests_to_the_endpoint_take_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")

    async def ask(task: Task, endpoint: Endpoint) -> float:
        assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.org,127.0.0.1"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx2.AsyncClient(headers=headers) as client:
            return (await client.post(f"{endpoint.base_url}/chat/completions", json={"messages": task.messages})).status_code

    _, end = await played(ask, "3")
    assert isinstance(end, Ended) and end.record.score == 200, end


async def test_an_ended_episodes_key_is_refused() -> None:
    kept: list[Endpoint] = []

    async def one(task: Task, endpoint: Endpoint) -> float:
        kept.append(endpoint)
        await post(endpoint, task.messages)
        assert (await post(Endpoint(endpoint.base_url, "another"), task.messages)).status_code == 401
        return 1.0

    _, end = await played(one, "3")
    assert isinstance(end, Ended), end
    assert (await post(kept[0], TASK.messages)).status_code == 401


async def test_the_endpoint_is_at_the_nodes_own_address_with_the_episodes_key() -> None:
    settings = {"name": "endpoint", "function": "tests.workers.environment_cases.knocks"}
    domain = {"data": {"train": "x.jsonl"}, "sampling": {"max_prompt_tokens": 20, "max_tokens": 40}, "environment": settings}
    worker = EnvironmentWorker(ROOT / "roll_lite/examples/models/tiny", DomainConfig.model_validate(domain), "add")
    ids, _ = await worker.prepare()
    address = ray.util.get_node_ip_address()
    expected = [address, *(f"{address} {status}" for status in (200, 401, 401))]
    await worker.tell([Begin(1, Task([{"role": "user", "content": "2+3="}], columns={"expected": expected}), 40)])
    while not (asks := (await worker.events())[0]):
        pass
    await worker.tell([Answer(1, asks[0].number, np.array(ids, np.int32).tobytes())])
    while not (ends := (await worker.events())[0]):
        pass
    [end] = ends
    assert isinstance(end, Ended) and end.record.correct, end


async def test_a_wrong_key_is_told_in_the_cause() -> None:
    async def mistaken(task: Task, endpoint: Endpoint) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="another") as client:
            await client.chat.completions.create(model=endpoint.model, messages=task.messages)  # type: ignore[arg-type]

    _, end = await played(mistaken)
    assert isinstance(end, Failed) and re.search("AuthenticationError: .*401.* no running episode has this API key", end.cause), end


async def test_a_conversation_without_room_is_refused() -> None:
    async def long(task: Task, endpoint: Endpoint) -> float:
        await post(endpoint, task.messages)
        reply = await post(endpoint, [{"role": "user", "content": "x" * 200}])
        assert reply.status_code == 400 and "no room is left for a response: the conversation has" in reply.json()["error"]["message"]
        return 0.25

    _, end = await played(long, "3")
    assert isinstance(end, Ended) and (end.finish_reason, end.record.score) == (FinishReason.STOP, 0.25), "the agent coped with it"


async def test_a_limit_is_remembered_though_another_request_went_on() -> None:
    """Failing for it would have the sample repeated until it is short."""

    async def fails(task: Task, endpoint: Endpoint) -> float:
        refused = await post(endpoint, [{"role": "user", "content": "x" * 200}])
        await post(endpoint, task.messages)
        refused.raise_for_status()
        return 1.0

    _, end = await played(fails, "3")
    assert isinstance(end, Ended) and (end.finish_reason, end.record.rewards) == (FinishReason.LENGTH, (0.0,))


@pytest.mark.parametrize(
    ("result", "cause"),
    [(KeyError("a bug"), "KeyError: 'a bug'"), (None, "the agent's result is None; expected a number")],
    ids=["error", "none"],
)
async def test_a_failure_after_a_limit_that_the_agent_coped_with_is_a_failure(result: Exception | None, cause: str) -> None:
    async def copes(task: Task, endpoint: Endpoint) -> None:
        assert (await post(endpoint, [{"role": "user", "content": "x" * 200}])).status_code == 400
        assert (await post(endpoint, task.messages)).status_code == 200
        if result is not None:
            raise result

    _, end = await played(copes, "3")
    assert isinstance(end, Failed) and cause in end.cause, end


@pytest.mark.parametrize("error", ["the code episode_over", "the episode is over; no further response is possible. No room."])
async def test_an_error_that_names_the_limit_ends_the_episode_at_it(error: str) -> None:
    """Clients' errors name it, and so do those of frameworks around them."""

    async def wraps(task: Task, endpoint: Endpoint) -> None:
        await post(endpoint, [{"role": "user", "content": "x" * 200}])
        await post(endpoint, task.messages)
        raise RuntimeError("the first of two sub-agents failed") from ValueError(error)

    _, end = await played(wraps, "3")
    assert isinstance(end, Ended) and (end.finish_reason, end.record.rewards) == (FinishReason.LENGTH, (0.0,)), end


@pytest.mark.parametrize("handled", [False, True])
async def test_a_limit_that_ends_one_of_several_sub_agents_ends_the_episode(handled: bool) -> None:
    """The group's own text does not name the limit, nor does that of an error raised while the limit's is handled."""

    async def sub_agents(task: Task, endpoint: Endpoint) -> None:
        refused, answered = asyncio.Event(), asyncio.Event()

        async def long() -> None:
            reply = await post(endpoint, [{"role": "user", "content": "x" * 200}])
            refused.set()
            await answered.wait()
            try:
                reply.raise_for_status()
            except httpx2.HTTPStatusError:
                if handled:
                    raise RuntimeError("a sub-agent failed")  # noqa: B904 - without a cause
                raise

        async def short() -> None:
            await refused.wait()
            await post(endpoint, task.messages)
            answered.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(long())
            group.create_task(short())

    _, end = await played(sub_agents, "3")
    assert isinstance(end, Ended) and (end.finish_reason, end.record.rewards) == (FinishReason.LENGTH, (0.0,)), end


async def test_an_agent_that_goes_on_after_a_limit_ends_at_the_limit() -> None:
    async def stubborn(task: Task, endpoint: Endpoint) -> float:
        await post(endpoint, [{"role": "user", "content": "x" * 200}])
        while True:
            await post(endpoint, task.messages)
            await asyncio.sleep(0.02)

    asks, end = await played(stubborn, "3", "4", max_turns=2, turn_timeout_s=4.0)
    assert isinstance(end, Ended) and (len(asks), end.finish_reason) == (2, FinishReason.MAX_TURNS)
    assert [message["content"] for message in end.record.messages] == ["Add.", "4"] and len(end.record.branches) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * 10_000_000}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "reasoning_content": "x" * 10_000_000}],
    ],
    ids=["content", "thoughts"],
)
async def test_a_huge_request_is_refused_before_it_is_tokenized(messages: list[Message]) -> None:
    async def huge(task: Task, endpoint: Endpoint) -> float:
        reply = await post(endpoint, messages)
        assert reply.status_code == 400 and re.search(r"the messages have 10000\d\d\d characters", reply.json()["error"]["message"])
        await post(endpoint, task.messages)
        return 1.0

    asks, end = await played(huge, "3")
    assert isinstance(end, Ended) and len(asks) == 1


class Aside(Characters):
    """Tokenizes outside the event loop only."""

    def text(self, text: str, after: bool = False) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        return super().text(text)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.text("".join(message["content"] for message in messages))


async def test_the_messages_of_a_continuation_hold_up_nobody() -> None:
    async def two_turns(task: Task, endpoint: Endpoint) -> float:
        first = (await post(endpoint, task.messages)).json()["choices"][0]["message"]
        return (await post(endpoint, [*task.messages, first, {"role": "user", "content": "More."}])).status_code

    asks, end = await played(two_turns, "3", "4", own=Aside(), renderer_of=lambda _: Aside())
    assert isinstance(end, Ended) and (end.record.score, [ask.after for ask in asks]) == (200, [None, 0]), end
    assert (end.record.metrics["environment_tokens"], end.record.metrics["template_tokens"]) == (5, 0)


async def test_floods_of_long_requests_hold_up_nobody() -> None:
    """They are rendered one at a time, outside the event loop, and no more than max_turns + 1 of them."""
    rendering, rendered = threading.Lock(), list[int]()

    class Slow(Aside):
        def prompt(self, messages: Sequence[Message]) -> list[int]:
            assert rendering.acquire(blocking=False), "two at a time"
            rendered.append(len(messages))
            time.sleep(0.05)
            rendering.release()
            return super().prompt(messages)

    async def floods(task: Task, endpoint: Endpoint) -> float:
        replies = await asyncio.gather(*(post(endpoint, [{"role": "user", "content": "x" * 300}]) for _ in range(9)))
        assert {reply.json()["error"]["code"] for reply in replies} == {"episode_over"}
        assert sum("too many messages were too long" in reply.json()["error"]["message"] for reply in replies) == 5
        assert (await post(endpoint, task.messages)).status_code == 400
        return 1.0

    async def first(task: Task, endpoint: Endpoint) -> float:
        await post(endpoint, task.messages)
        return await floods(task, endpoint)

    _, end = await played(first, "3", max_turns=3, renderer_of=lambda _: Slow())
    assert isinstance(end, Ended) and (end.finish_reason, len(rendered)) == (FinishReason.STOP, 5), end


async def test_an_agent_whose_first_prompt_is_too_long_is_told_why() -> None:
    async def long(task: Task, endpoint: Endpoint) -> None:
        (await post(endpoint, [{"role": "user", "content": "x" * 200}])).raise_for_status()

    _, end = await played(long)
    assert isinstance(end, Failed) and "it ended without a response: no room is left" in end.cause


def test_a_program_ends_with_its_worker(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n", encoding="utf-8")
    worker = f"""
import asyncio
from roll_lite.environments.agents import Endpoint, command_agent
from roll_lite.environments.base import Task
asyncio.run(command_agent([{sys.executable!r}, {str(agent)!r}])(Task([]), Endpoint("http://nowhere", "key")))
"""
    with subprocess.Popen([sys.executable, "-c", worker], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        deadline = time.monotonic() + 60
        while not (file := tmp_path / "pid").exists() or not file.read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.kill()
    pid = int(file.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("copes", [True, False])
async def test_refused_requests_are_counted_and_are_the_cause_of_a_failure(copes: bool) -> None:
    """Whatever refused them: a parameter, the messages, the path or the JSON."""

    async def refused(task: Task, endpoint: Endpoint) -> float:
        await post(endpoint, task.messages)
        async with httpx2.AsyncClient(timeout=60.0) as client:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            bodies = (
                ("embeddings", b"{}"),
                ("responses", b"{"),
                ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "n": 2}'),
            )
            statuses = [
                (await client.post(f"{endpoint.base_url}/{path}", headers=headers, content=body)).status_code for path, body in bodies
            ]
        assert statuses == [404, 400, 400] and copes
        return 1.0

    _, end = await played(refused, "3")
    if copes:
        assert isinstance(end, Ended) and (end.record.metrics["refused_requests"], end.record.rewards) == (3, (1.0,))
    else:
        assert isinstance(end, Failed)
        reason = "n: 2 is not possible; a request gets one response; send several requests"
        assert end.cause.startswith(f"a request was refused ({reason}), then: AssertionError")


async def test_the_ledger_keeps_both_a_long_reason_and_the_failure() -> None:
    async def fails(task: Task, endpoint: Endpoint) -> None:
        await post(endpoint, task.messages)
        assert (await post(Endpoint(f"{endpoint.base_url}/{'x' * 1000}", endpoint.api_key), task.messages)).status_code == 404
        raise OSError("no service")

    _, end = await played(fails, "3")
    assert isinstance(end, Failed), end
    line = group_line(0, "add", (0, 0), 1, FAILED, cause=f"environment: {end.cause}")
    assert f"POST /v1/{'x' * 150}" in line["cause"] and "OSError: no service" in line["cause"], line


async def test_requests_with_tools_are_refused_where_the_template_is_plain() -> None:
    async def two_requests(task: Task, endpoint: Endpoint) -> float:
        refused = await post(endpoint, task.messages, tools=[{"type": "function", "function": WEATHER}])
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"domains.add.template.name: {TOOLS_NEED_CHAT}"
        assert (await post(endpoint, task.messages)).status_code == 200
        return 1.0

    section = {"name": "endpoint", "function": "tests.workers.environment_cases.knocks"}
    domain = DomainConfig.model_validate({"data": {"train": "x.jsonl"}, "environment": section})
    tokenizer = load_tokenizer(ROOT / "roll_lite/examples/models/tiny")
    asks, end = await played(two_requests, "3", renderer_of=renderers_of(domain, tokenizer, "domains.add"))
    assert isinstance(end, Ended) and (len(asks), end.record.metrics["refused_requests"]) == (1, 1), end


async def test_the_end_of_an_episode_is_no_refusal() -> None:
    async def stubborn(task: Task, endpoint: Endpoint) -> float:
        for status in (200, 400, 400):
            assert (await post(endpoint, task.messages)).status_code == status
        return 1.0

    _, end = await played(stubborn, "3", max_turns=1)
    assert isinstance(end, Ended) and end.record.metrics["refused_requests"] == 0
