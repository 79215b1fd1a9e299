"""Environments of the tests, loaded by the workers."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2
from openai import AsyncOpenAI

from roll_lite.environments.agents import Endpoint
from roll_lite.environments.base import Message, Step, Task
from roll_lite.environments.episode import Policy


class HigherLower:
    """Guess `answer`."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def reset(self, task: Task) -> None:
        self.number = int(task.answer)

    def step(self, message: Message) -> Any:
        guess = int(message["content"])
        if guess == self.number:
            return Step(reward=1.0 + self.bonus, done=True, correct=True)
        return "higher" if guess < self.number else "lower"


async def troubled(task: Task, policy: Policy) -> float:
    """Do what the row says, and succeed otherwise."""
    await policy.respond("Go.")
    match task.columns.get("trouble"):
        case "raise":
            raise OSError("no service")
        case "die":
            os._exit(1)
        case "block":
            time.sleep(600)  # noqa: ASYNC251 - what is tested
        case "hang":
            await asyncio.sleep(600)
        case "slow":
            await asyncio.sleep(1)
    return 1.0


class NeverCloses(HigherLower):
    """Hang in a step, and again after its time limit."""

    def step(self, message: Message) -> Any:
        time.sleep(600)

    def close(self) -> None:
        time.sleep(600)


class HangsInThread:
    """Hang in a step that runs in a thread, if the row says so."""

    def reset(self, task: Task) -> None:
        self.hangs = bool(task.columns.get("trouble"))

    def step(self, message: Message) -> Step:
        if self.hangs:
            time.sleep(600)
        return Step(reward=1.0, done=True)


class NoStep:
    def reset(self, task: Task) -> None: ...


def not_async(task: Task, policy: Policy) -> None: ...


async def second_chance(task: Task, policy: Policy) -> bool:
    """Ask again if the first answer is wrong: a whole run with the tiny model."""
    message = await policy.respond(task.messages)
    if message["content"] == task.answer:
        return True
    message = await policy.respond(task.messages)
    return message["content"] == task.answer


async def each_counts(task: Task, policy: Policy) -> None:
    """Reward every response, and play both turns: a whole run with rewards of turns."""
    for share in (0.25, 1.0):
        message = await policy.respond(task.messages)
        await asyncio.sleep(0.02)
        policy.reward(share * (message["content"] == task.answer) - 0.01 * len(message["content"]))


async def branching(task: Task, endpoint: Endpoint) -> float:
    """An agent that retries, edits its history and asks for several answers at once. The reward is any that differs."""
    client, seed = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key), random.Random(task.seed)
    answers: list[str] = []

    async def say(messages: list[Message]) -> list[Message]:
        reply = (await client.chat.completions.create(model=endpoint.model, messages=messages)).choices[0].message  # type: ignore[arg-type]
        answers.append(reply.content or "")
        return [*messages, {"role": "assistant", "content": reply.content}]

    first = await say(task.messages)
    again: Message = {"role": "user", "content": f" {task.messages[-1]['content']}"}
    second = await say([*first, again])
    for _ in range(seed.randint(0, 2)):
        match seed.choice(("parallel", "retry", "edit", "new")):
            case "parallel":
                await asyncio.gather(say([*second, again]), say([*second, again]), say([*first, again]))
            case "retry":
                await say([*first, again])
            case "edit":
                await say([{**first[0], "content": "1+1="}, *first[1:], again])
            case "new":
                await say([{"role": "user", "content": "2+2="}])
    await client.close()
    return sum(map(len, answers)) % 5 / 4


async def says_its_seed(task: Task, policy: Policy) -> float:
    await policy.respond(task.messages)
    await policy.respond(str(task.seed % 1000))
    return 1.0


async def knocks(task: Task, endpoint: Endpoint) -> bool:
    """Ask the endpoint with the key, without and with another one, and at other addresses of the node. Solved if the row expects what came
    back."""
    url = urlsplit(endpoint.base_url)
    told = [str(url.hostname)]
    async with httpx2.AsyncClient(timeout=60.0) as client:
        for host in {url.hostname, "127.0.0.1", "127.0.0.2"}:
            for headers in ({"Authorization": f"Bearer {endpoint.api_key}"}, {}, {"Authorization": "Bearer guessed"}):
                with suppress(httpx2.ConnectError):
                    to = f"http://{host}:{url.port}{url.path}/chat/completions"
                    told.append(f"{host} {(await client.post(to, headers=headers, json={'messages': task.messages})).status_code}")
    assert told == task.columns["expected"], told
    return True
