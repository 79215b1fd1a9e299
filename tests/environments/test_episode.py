"""Episodes played in one process, with a hand-made renderer: a text's tokens are its characters, and a response ends with 0."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from roll_lite.data.samples import FinishReason
from roll_lite.environments import episode
from roll_lite.environments.base import Message, Step, Task
from roll_lite.environments.episode import (
    Answer,
    Ask,
    Begin,
    Calls,
    Cancel,
    Ended,
    EpisodeFunction,
    Failed,
    Limits,
    Player,
    Policy,
    play_class,
)


class Characters:
    thinking = False

    def text(self, text: str, after: bool = False) -> list[int]:
        return [ord(one) for one in text]

    def exact(self, response_ids: Sequence[int]) -> str:
        return "".join(map(chr, response_ids))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return [ord(one) for message in messages for one in message["content"]]

    def continuation(self, response_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [*([] if response_ids[-1:] == [0] else [0]), *self.prompt(messages)]

    def content_tokens(self, messages: Sequence[Message]) -> int:
        return len(self.prompt(messages))

    def message(self, response_ids: Sequence[int]) -> Message:
        return {"role": "assistant", "content": "".join(chr(one) for one in response_ids if one)}

    def difference(self) -> None: ...


def encoded(text: str) -> bytes:
    return np.array([*map(ord, text), 0], np.int32).tobytes()


def decoded(ids: bytes) -> str:
    return "".join(chr(one) if one else "|" for one in np.frombuffer(ids, np.int32))


TASK = Task([{"role": "user", "content": "Guess."}], answer=3)


class Guess:
    """Guess a number: higher, lower, or done."""

    closed = 0

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def reset(self, task: Task) -> None:
        self.number = task.answer

    def step(self, message: Message) -> Step:
        guess = int(message["content"])
        if guess == self.number:
            return Step(reward=1.0 + self.bonus, done=True, correct=True, metrics={"hits": 1})
        return Step("higher" if guess < self.number else "lower", reward=-0.25)

    def close(self) -> None:
        Guess.closed += 1


async def played(
    play: EpisodeFunction, *responses: str, room: int = 100, calls: Calls | None = None, **limits: Any
) -> tuple[list[str], Any]:
    """Play one episode with these responses; returns what the policy was shown, and the last event."""
    given = Limits(**{"max_turns": 9, "turn_timeout_s": 5.0, "max_prompt_tokens": 50} | limits)
    player = Player(play, Characters(), given, calls or Calls())
    player.tell([Begin(7, TASK, room)])
    shown: list[str] = []
    answers = iter(responses)
    while True:
        for event in await player.events(5.0):
            assert event.episode == 7
            if not isinstance(event, Ask):
                return shown, event
            shown.append(decoded(event.ids))
            player.tell([Answer(7, event.number, encoded(next(answers)))])


def guessing(**args: Any) -> EpisodeFunction:
    return play_class(Guess, args, Calls())


async def test_a_class_plays_until_it_is_done() -> None:
    before = Guess.closed
    shown, end = await played(guessing(bonus=0.5), "1", "5", "3")
    assert shown == ["Guess.", "higher", "lower"]
    assert isinstance(end, Ended)
    record = end.record
    assert (record.rewards, record.score, record.correct, end.finish_reason) == ((-0.25, -0.25, 1.5), 1.0, True, None)
    assert [message["content"] for message in record.messages] == ["Guess.", "1", "higher", "5", "lower", "3"]
    assert (record.metrics["turns"], record.metrics["hits"]) == (3, 1)
    assert (record.metrics["policy_tokens"], record.metrics["environment_tokens"], record.metrics["template_tokens"]) == (6, 11, 0)
    assert Guess.closed == before + 1


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_response_that_the_environment_cancelled_fails_the_episode(goes_on: bool) -> None:
    async def impatient(task: Task, policy: Policy) -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy.respond(task.messages), 0.05)
        if goes_on:
            await policy.respond("Again.")
        return 1.0

    player = Player(impatient, Characters(), Limits(9, 5.0, 50), Calls())
    player.tell([Begin(7, TASK, 100)])
    [asked] = await player.events(5.0)
    [end] = await player.events(5.0)
    assert isinstance(asked, Ask) and isinstance(end, Failed)
    assert "the environment cancelled a response of the policy" in end.cause


async def test_the_last_reward_alone() -> None:
    _, end = await played(guessing(), "1", "3", last_reward=True)
    assert end.record.score == 1.0


async def test_an_episode_ends_after_its_last_turn() -> None:
    shown, end = await played(guessing(), "1", "2", max_turns=2)
    assert shown == ["Guess.", "higher"]
    assert (end.finish_reason, end.record.rewards, end.record.correct) == (FinishReason.MAX_TURNS, (-0.25, -0.25), None)


async def test_the_end_of_an_episode_may_be_wrapped_by_a_task_group() -> None:
    async def grouped(task: Task, policy: Policy) -> float:
        async with asyncio.TaskGroup():
            await policy.respond("Go.")
            await policy.respond("Go on.")
        return 1.0

    _, end = await played(grouped, "1", max_turns=1)
    assert isinstance(end, Ended) and (end.finish_reason, end.record.rewards) == (FinishReason.MAX_TURNS, (0.0,)), end


async def test_an_episode_ends_when_no_token_of_a_response_has_room() -> None:
    """A response takes 2 tokens and "higher" 6: with 9 tokens one is left for the second response, with 8 none."""
    (shown, end), (few, cut) = await played(guessing(), "1", "3", room=9), await played(guessing(), "1", room=8)
    assert (len(shown), end.finish_reason) == (2, None)
    assert (few, cut.finish_reason) == (["Guess."], FinishReason.LENGTH)


@pytest.mark.parametrize(("most", "room", "asked"), [(None, 100, None), (8, 100, 8), (8, 6, None)])
async def test_the_limit_of_a_turn(most: int | None, room: int, asked: int | None) -> None:
    player = Player(guessing(), Characters(), Limits(9, 5.0, 50, most), Calls())
    player.tell([Begin(0, TASK, room)])
    (event,) = await player.events(5.0)
    assert isinstance(event, Ask) and event.most == asked


async def agent(task: Task, policy: Policy, tries: int = 3) -> bool:
    for _ in range(tries):
        if (await policy.respond("Well?"))["content"] == str(task.answer):
            return True
        policy.reward(-1)
    return False


async def test_an_async_function_plays() -> None:
    shown, end = await played(partial(agent, tries=2), "1", "3")
    assert shown == ["Well?", "Well?"]
    assert (end.record.rewards, end.record.correct) == ((-1, 1), True)
    _, lost = await played(partial(agent, tries=1), "1")
    assert (lost.record.rewards, lost.record.correct) == ((-1,), False)


async def test_numbers_of_numpy_become_pythons() -> None:
    def step(environment: Guess, message: Message) -> Step:
        return Step(reward=np.float32(1), done=True, correct=np.bool_(True), metrics={"hits": np.float32(1)})

    async def solves(task: Task, policy: Policy) -> Any:
        await policy.respond("Well?")
        return np.bool_(True)

    _, of_class = await played(play_class(type("Numpy", (Guess,), {"step": step}), {}, Calls()), "3")
    _, of_function = await played(solves, "3")
    assert of_class.record.correct is of_function.record.correct is True
    assert type(of_class.record.metrics["hits"]) is type(of_class.record.score) is type(of_function.record.score) is float


async def raises(task: Task, policy: Policy) -> None:
    await policy.respond("Well?")
    raise KeyError("lost")


async def never_ends(task: Task, policy: Policy) -> None:
    await policy.respond("Well?")
    await asyncio.sleep(60)


async def cancels(task: Task, policy: Policy) -> None:
    await policy.respond("Well?")
    raise asyncio.CancelledError


async def leaves(task: Task, policy: Policy) -> None:
    sys.exit(3)


async def rewards_nan(task: Task, policy: Policy) -> float:
    await policy.respond("Well?")
    return float("nan")


async def says_nothing(task: Task, policy: Policy) -> None:
    await policy.respond([{"role": "user"}])


async def says_objects(task: Task, policy: Policy) -> None:
    await policy.respond({"role": "user", "content": "Hi.", "sender": object()})


async def asks_twice(task: Task, policy: Policy) -> None:
    await asyncio.gather(policy.respond("One?"), policy.respond("Two?"))


async def never_asks(task: Task, policy: Policy) -> None: ...


async def swallows(task: Task, policy: Policy) -> None:
    """Catch everything, as broad handlers do."""
    try:
        while True:
            await policy.respond("Well?")
    except Exception:
        return


async def raises_in_a_task(task: Task, policy: Policy) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(task, policy))


async def raises_a_group(task: Task, policy: Policy) -> None:
    raise ExceptionGroup("two things", [ValueError("it is broken"), KeyError("lost")])


class Unfinished:
    def reset(self, task: Task) -> str:
        return "Go."

    def step(self, message: Message) -> Any:
        return {"done": True}


FAILURES: dict[str, tuple[EpisodeFunction, str]] = {
    "raises": (raises, r"KeyError: 'lost' \(.*test_episode.py, line \d+\)"),
    "raises in a task group": (raises_in_a_task, r"KeyError: 'lost' \(.*test_episode.py, line \d+\)"),
    "raises a group": (raises_a_group, r"ValueError: it is broken \(.*test_episode.py, line \d+\)"),
    "hangs": (never_ends, r"it took longer than 0.3 s \(turn_timeout_s\) to answer a response"),
    "hangs in a thread": (
        play_class(type("Slow", (Guess,), {"step": lambda self, message: time.sleep(1)}), {}, Calls()),
        r"it took longer than 0.3 s \(turn_timeout_s\)",
    ),
    "not finite": (rewards_nan, "the reward nan is not finite"),
    "no message": (says_nothing, r"returned .* as a message; expected a text or \{role, content\}"),
    "no plain message": (says_objects, "returned .* as messages, but all fields must be JSON values: Object of type object"),
    "no step": (play_class(Unfinished, {}, Calls()), r"step returned \{'done': True\}; expected a Step, or a tuple"),
    "no response": (never_asks, "it ended without a response"),
    "leaves Python": (
        play_class(type("Leaves", (Guess,), {"step": lambda self, message: sys.exit(3)}), {}, Calls()),
        "RuntimeError: SystemExit: 3",
    ),
    "leaves Python, async": (leaves, "SystemExit: 3"),
    "cancels itself": (cancels, "CancelledError"),
    "two at once": (asks_twice, "asked for a response while it writes another one"),
}


async def test_a_swallowed_limit_is_still_told() -> None:
    shown, end = await played(swallows, "1", "2", max_turns=2)
    assert len(shown) == 2 and isinstance(end, Ended) and end.finish_reason is FinishReason.MAX_TURNS


async def test_an_episode_that_hangs_after_a_limit_ends_at_the_limit() -> None:
    async def hangs(task: Task, policy: Policy) -> None:
        await swallows(task, policy)
        await asyncio.sleep(60)

    shown, end = await played(hangs, "1", "2", max_turns=2, turn_timeout_s=0.3)
    assert len(shown) == 2 and isinstance(end, Ended) and end.finish_reason is FinishReason.MAX_TURNS


@pytest.mark.parametrize("name", FAILURES)
async def test_what_fails_is_told_and_is_no_score(name: str) -> None:
    play, cause = FAILURES[name]
    _, end = await played(play, "1", "1", turn_timeout_s=0.3)
    assert isinstance(end, Failed)
    assert re.search(cause, end.cause), end.cause


async def test_time_of_the_policy_is_not_the_environments() -> None:
    limit_s, policy_s, clock = 1.0, 1.2, asyncio.get_running_loop().time
    player, begun = Player(guessing(), Characters(), Limits(9, limit_s, 50), Calls()), clock()
    player.tell([Begin(0, TASK, 100)])
    (event,) = await player.events(5.0)
    assert isinstance(event, Ask)
    await asyncio.sleep(policy_s)
    player.tell([Answer(0, 0, encoded("3"))])
    (end,) = await player.events(5.0)
    assert isinstance(end, Ended) and policy_s <= end.record.metrics["waiting_seconds"]
    assert end.record.metrics["environment_seconds"] + end.record.metrics["waiting_seconds"] <= clock() - begun


async def test_a_long_first_prompt_is_refused() -> None:
    _, end = await played(guessing(), max_prompt_tokens=5)
    assert isinstance(end, Failed) and "the first prompt has 6 tokens; sampling.max_prompt_tokens is 5" in end.cause


@pytest.mark.parametrize("at", [0, 1])
async def test_huge_messages_are_refused_before_they_are_tokenized(at: int) -> None:
    """150 tokens have at most 64 * 150 characters."""

    async def huge(task: Task, policy: Policy) -> None:
        for number in range(2):
            await policy.respond("x" * 9601 if number == at else "x")

    class Small(Characters):
        def prompt(self, messages: Sequence[Message]) -> list[int]:
            assert len(messages[0]["content"]) == 1
            return super().prompt(messages)

    player = Player(huge, Small(), Limits(9, 5.0, 50), Calls())
    player.tell([Begin(0, TASK, 100)])
    for _ in range(at):
        await player.events(5.0)
        player.tell([Answer(0, 0, encoded("1"))])
    [end] = await player.events(5.0)
    if at:
        assert isinstance(end, Ended) and (end.finish_reason, end.record.rewards) == (FinishReason.LENGTH, (0.0,))
    else:
        assert isinstance(end, Failed) and "no room is left for a response: the messages have 9601" in end.cause


async def test_a_cancelled_episode_says_nothing_more() -> None:
    player = Player(guessing(), Characters(), Limits(9, 5.0, 50), Calls())
    player.tell([Begin(0, TASK, 100), Begin(1, TASK, 100)])
    assert {event.episode for event in await player.events(5.0)} == {0, 1}
    player.tell([Cancel(0)])
    await asyncio.sleep(0.05)
    player.tell([Answer(0, 0, encoded("3")), Answer(1, 0, encoded("3"))])
    (end,) = await player.events(5.0)
    assert end.episode == 1


async def test_hanging_threads_are_counted_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "STUCK_AFTER_S", 0.2)
    go, calls = threading.Event(), Calls()

    def wait(environment: Guess, message: Message) -> Step:
        go.wait(30)
        return Step(done=True)

    waiting: Callable[..., Any] = type("Waits", (Guess,), {"step": wait})
    _, end = await played(play_class(waiting, {}, calls), "1", turn_timeout_s=0.1, calls=calls)
    assert isinstance(end, Failed) and calls.stuck == 0, "it may be about to end"
    await asyncio.sleep(0.3)
    assert calls.stuck == 1
    go.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
    assert calls.stuck == 0
