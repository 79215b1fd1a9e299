"""Environments in worker processes: what they play, and what their exceptions, hangs and deaths cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data.samples import Author, FinishReason, GenerationRequest, Prompt, Sampling, TokenRow, Turn
from roll_lite.data.templates import load_tokenizer
from roll_lite.distributed.failures import MemberLost
from roll_lite.environments.episode import Ask
from roll_lite.observability.timers import POOL_WORK
from roll_lite.scheduler.runner import Conversation, EpisodeFailed
from roll_lite.workers import environment
from roll_lite.workers.environment import EnvironmentPool, _Running

pytestmark = pytest.mark.usefixtures("ray_local")
MODEL = "examples/models/tiny"
CASES = "tests.workers.environment_cases"
TOKENIZER = load_tokenizer(Path(__file__).resolve().parents[2] / "roll_lite" / MODEL)


def domain(function: str, **settings: Any) -> DomainConfig:
    settings = {"name": "function", "function": f"{CASES}.{function}", "turn_timeout_s": 2.0} | settings
    data = {"data": {"train": "examples/data/add_train.jsonl"}, "sampling": {"max_prompt_tokens": 20, "max_tokens": 40}}
    return DomainConfig.model_validate(data | {"environment": settings})


@asynccontextmanager
async def pool(function: str, **settings: Any) -> AsyncIterator[EnvironmentPool]:
    environments = EnvironmentPool("toy", domain(function, **settings), Path(TOKENIZER.name_or_path))
    await environments.start()
    try:
        yield environments
    finally:
        environments.close()


def conversation(*responses: str) -> Conversation:
    """A conversation in which the policy gives these responses, each ended by EOS."""
    left = iter(responses)

    async def ask(request: GenerationRequest, _: Turn | None) -> Turn:
        text = next(left)
        ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        tokens = TokenRow(request.request_id, 0, request.prompt_length + len(ids))
        return Turn(request.request_id, len(ids), text, FinishReason.STOP, tokens=tokens, ids=np.array(ids, np.int32).tobytes())

    return Conversation(ask, "toy/0/0/0/0/0", Sampling(1.0, 40), wants_ids=True)


def prompt(answer: str = "5", **columns: Any) -> Prompt:
    return Prompt("toy", 0, "Guess.", tuple(TOKENIZER.encode("Guess.")), answer, columns, question="Guess.")


async def outcome(environments: EnvironmentPool, talk: Conversation, **columns: Any) -> str:
    try:
        await environments.play(prompt(**columns), talk)
    except EpisodeFailed as failed:
        return f"{'' if failed.counts else 'uncounted: '}{failed.cause}"
    return "played"


async def test_an_episode_from_prompt_to_score() -> None:
    async with pool("HigherLower", args={"bonus": 0.5}) as environments:
        POOL_WORK.take()
        since, talk = time.time(), conversation("3", "5")
        assert await outcome(environments, talk) == "played"
    work = POOL_WORK.take()
    assert {(one.name, one.role, one.rank) for one in work} == {(f"{environments._path}[0] play", environments._path, 0)}
    assert since - 0.1 <= work[0].start and sum(one.seconds for one in work) <= time.time() - since + 0.1
    transcript = talk.transcript()
    assert [(one.author, one.length) for one in transcript.segments] == [
        (Author.PROMPT, 6),
        (Author.POLICY, 2),
        (Author.ENVIRONMENT, 6),
        (Author.POLICY, 2),
    ]
    assert transcript.episode is not None and (transcript.episode.score, transcript.episode.correct) == (1.5, True)
    assert (transcript.last_text, transcript.finish_reason) == ("5", FinishReason.STOP)


@pytest.mark.nightly
async def test_an_episode_that_a_resumed_run_plays_again_gets_the_same_seed() -> None:
    """Its group has another number then."""
    async with pool("says_its_seed", max_turns=2) as environments:
        talk = conversation("1", "2")
        await environments.play(prompt(), talk)
        assert [(one.number, one.after, one.branches) for one in talk.saved()] == [(0, None, False), (1, 0, False)]

        async def refuse(request: GenerationRequest, _: Turn | None) -> Turn:
            raise AssertionError(f"{request.request_id} is asked again")

        again = Conversation(refuse, "toy/0/0/9/0/0", talk.sampling, wants_ids=True, saved=talk.saved())
        await environments.play(prompt(), again)
        assert again.saved() == talk.saved() and again.transcript().segments == talk.transcript().segments


async def test_a_canned_episode_tells_what_is_broken() -> None:
    async with pool("HigherLower") as environments:
        problem = await environments.problem([prompt()])
    assert problem is not None
    assert "domains.toy.environment: playing a first episode, with the response 'The answer is 1.', failed: ValueError" in problem


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("HigherLower", {"args": {"bonos": 1}}, r"environment.function: .* takes `args`: got an unexpected keyword argument 'bonos'"),
        ("NoStep", {}, r"has no method step; an environment has both"),
        ("not_async", {}, r"must be `async def`: it awaits the policy's responses"),
        ("missing", {}, r"tests.workers.environment_cases has no 'missing'"),
    ],
)
async def test_mistakes_are_told_at_the_start(function: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async with pool(function, **settings):
            pass


async def test_failures_cost_their_own_episode_only() -> None:
    async with pool("troubled") as environments:
        kinds = ["slow", "raise", "hang"]
        results = await asyncio.gather(*(outcome(environments, conversation("x"), trouble=kind) for kind in kinds))
        assert len(environments.newly_replaced()) == 0
    assert results[0] == "played"
    assert "OSError: no service" in results[1] and "environment_cases.py, line" in results[1]
    assert "it took longer than 2 s (turn_timeout_s)" in results[2]


@pytest.mark.nightly
async def test_a_death_is_blamed_on_an_episode_only_if_no_other_can_be_guilty() -> None:
    async with pool("troubled") as environments:
        both = await asyncio.gather(*(outcome(environments, conversation("x"), trouble=kind) for kind in ("die", "hang")))
        assert [result.startswith("uncounted: ") for result in both] == [True, True], both
        alone = await outcome(environments, conversation("x"), trouble="die")
        assert not alone.startswith("uncounted") and alone != "played"
        assert await outcome(environments, conversation("x")) == "played", "the worker is replaced"
        assert len(environments.newly_replaced()) == 2


@pytest.mark.nightly
async def test_an_episode_that_waits_for_the_policy_is_not_blamed() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def ask(request: GenerationRequest, _: Turn | None) -> Turn:
        asked.set()
        await go.wait()
        return Turn(request.request_id, 1, "x", FinishReason.STOP, ids=np.array([5], np.int32).tobytes())

    async with pool("troubled") as environments:
        waiting = asyncio.create_task(outcome(environments, Conversation(ask, "r", Sampling(1.0, 40), wants_ids=True)))
        await asked.wait()
        assert not (await outcome(environments, conversation("x"), trouble="die")).startswith("uncounted")
        go.set()
        assert (await waiting).startswith("uncounted: ")


async def test_a_blocked_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "GRACE_SECONDS", 0.5)
    async with pool("troubled", turn_timeout_s=1.0) as environments:
        assert "it did not answer within 2.5 s" in await outcome(environments, conversation("x"), trouble="block")
        assert await outcome(environments, conversation("x")) == "played"


@pytest.mark.nightly
async def test_a_worker_in_which_calls_hang_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot end their threads. Another episode of the worker is repeated without blame."""
    monkeypatch.setattr(environment, "STUCK_THREADS", 2)
    asked = asyncio.Event()

    async def never(request: GenerationRequest, _: Turn | None) -> Turn:
        asked.set()
        await asyncio.sleep(600)
        raise AssertionError

    async with pool("HangsInThread", turn_timeout_s=1.0) as environments:
        other = asyncio.create_task(outcome(environments, Conversation(never, "r", Sampling(1.0, 40), wants_ids=True)))
        await asked.wait()
        hung = await asyncio.gather(*(outcome(environments, conversation("x"), trouble="hang") for _ in range(2)))
        assert all("it took longer than 1 s (turn_timeout_s)" in one for one in hung), hung
        async with asyncio.timeout(120):
            told = await other
        assert told.startswith("uncounted: ") and "2 calls hang in it" in told
        assert await outcome(environments, conversation("x")) == "played" and len(environments.newly_replaced()) == 1


@pytest.mark.nightly
async def test_an_episode_that_does_not_even_end_costs_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "GRACE_SECONDS", 0.5)
    async with pool("NeverCloses", turn_timeout_s=1.0) as environments:
        assert "an episode did not end 0.5 s after its time limit" in await outcome(environments, conversation("no number"))
        assert len(environments.newly_replaced()) <= 1


@pytest.mark.nightly
async def test_episodes_beyond_the_limit_wait() -> None:
    async with pool("troubled", parallel=2, workers=2) as environments:
        plays = [asyncio.create_task(outcome(environments, conversation("x"), trouble="slow")) for _ in range(6)]
        await asyncio.sleep(0.5)
        assert [len(member.running) for member in environments._fleet.members] == [2, 2]
        assert set(await asyncio.gather(*plays)) == {"played"}


async def test_an_episode_with_a_request_in_the_queue_does_not_cost_its_worker() -> None:
    """After a stall of the service, its time limit is long over, but the worker has done its part."""
    environments: Any = object.__new__(EnvironmentPool)
    environments._settings = SimpleNamespace(turn_timeout_s=1.0)
    running = _Running(asyncio.Queue(), asyncio.get_running_loop().time() - 100.0)
    asked = iter([[Ask(7, 0, None, b"", None)], []])

    async def events() -> tuple[list[Ask], int]:
        return next(asked), 0

    member: Any = SimpleNamespace(name="one", running={7: running}, actor=SimpleNamespace(events=SimpleNamespace(remote=events)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await environments._serve(member)
    running.events.get_nowait()
    asked = iter([[]])
    with pytest.raises(MemberLost, match="did not end"):
        await environments._serve(member)
