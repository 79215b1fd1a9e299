"""Environments of other projects, played with their real packages: `make test-adapters`."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import numpy as np
import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.environments import OpenEnvEnvironmentConfig
from roll_lite.data.samples import EpisodeRecord, FinishReason, Prompt
from roll_lite.environments.base import Task
from roll_lite.environments.build import player_of
from roll_lite.environments.check import check_environments
from roll_lite.environments.episode import Answer, Ask, Begin, Ended, Failed
from roll_lite.files import CONFIGS
from roll_lite.workers.environment import EnvironmentPool

gymnasium = pytest.importorskip("gymnasium")
textarena = pytest.importorskip("textarena")
reasoning_gym = pytest.importorskip("reasoning_gym")
pytest.importorskip("openenv")
pytest.importorskip("verifiers")

CASES, VERIFIERS = "tests.environments.adapter_cases", "tests.environments.verifiers_cases"
ROOT = Path(__file__).resolve().parents[2] / "roll_lite"


class Played(NamedTuple):
    shown: list[str]
    """Tokens that the policy was shown before each response, as text."""
    end: Ended | Failed

    @property
    def record(self) -> EpisodeRecord:
        assert isinstance(self.end, Ended), self.end
        return self.end.record

    @property
    def said(self) -> list[str]:
        return [message["content"] for message in self.record.messages if message["role"] != "assistant"]


Play = Callable[..., Awaitable[Played]]


@pytest.fixture
def play(tokenizer_of: Callable[[str], Any]) -> Play:
    tokenizer = tokenizer_of("qwen2.5")

    async def played(
        environment: dict[str, Any], *responses: str, prompt: str = "Play.", answer: Any = None, room: int = 9000, **row: Any
    ) -> Played:
        domain = DomainConfig.model_validate(
            {
                "data": {"train": "none.jsonl"},
                "template": {"name": "chat"},
                "sampling": {"max_prompt_tokens": 4000},
                "environment": {"turn_timeout_s": 20, **environment},
            }
        )
        player = player_of(domain, tokenizer, "domains.x", "127.0.0.1")
        player.tell([Begin(0, Task([{"role": "user", "content": prompt}], answer, row, seed=7), room)])
        shown, answers = [], iter(responses)
        while True:
            for event in await player.events(20.0):
                if not isinstance(event, Ask):
                    return Played(shown, event)
                shown.append(tokenizer.decode(np.frombuffer(event.ids, np.int32)))
                ids = [*tokenizer.encode(next(answers), add_special_tokens=False), tokenizer.eos_token_id]
                player.tell([Answer(0, event.number, np.array(ids, np.int32).tobytes())])

    return played


# ---------------------------------------------------------------- gym

LAKE = {"name": "gym", "id": "FrozenLake-v1", "args": {"is_slippery": False, "render_mode": "ansi"}, "max_turns": 9}


async def test_a_registered_environment_with_numbered_actions(play: Play) -> None:
    """The way over the 4x4 map of Gymnasium's documentation."""
    played = await play(LAKE, "<think>0</think>I choose 1", "1", "down?", "2", "2", "1", "2")
    assert played.record.rewards == (0, 0, 0, 0, 0, 0, 1)
    assert played.said[0].startswith("Play.\n\n") and "FHFH" in played.said[0]
    assert played.said[3] == "Answer with a whole number from 0 to 3."
    assert (played.record.metrics["invalid_actions"], played.record.metrics["prob"]) == (1, 1)


async def test_the_seed_of_the_row_decides_else_that_of_the_episode(play: Play) -> None:
    for row, seed in (({"seed": 5}, 5), ({}, 7)):
        hand, _ = gymnasium.make("Blackjack-v1").reset(seed=seed)
        played = await play({"name": "gym", "id": "Blackjack-v1"}, "0", prompt="", **row)
        assert played.said == [str(hand)]


async def test_an_environments_class_with_texts(play: Play) -> None:
    section = {"name": "gym", "function": f"{CASES}.Countdown", "columns": ["start"]}
    played = await play(section, "2", "1", start=2)
    assert (played.said, played.record.rewards, played.record.correct) == (["Play.\n\nCount down from 2.", "Go on."], (0.25, 0.25), True)
    assert (played.record.metrics["left"], "note" in played.record.metrics) == (0, False)
    lost = await play(section, "7", start=2)
    assert (lost.record.score, lost.record.correct) == (0.25, False)


async def test_actions_read_by_a_function(play: Play) -> None:
    section = {"name": "gym", "function": f"{CASES}.Countdown", "columns": ["start"], "action": f"{CASES}.last_word"}
    played = await play(section, "I say 2", "", "and 1", start=2)
    assert played.said[1:] == ["Go on.", "Say something."] and played.record.correct is True


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "gym", "id": "FrozenLak-v1"}, r"domains.x.environment.id: 'FrozenLak-v1': it cannot be made: .*FrozenLake"),
        ({"name": "gym", "id": "FrozenLake-v1", "args": {"map": 1}}, "it cannot be made: TypeError.*map"),
        (
            {"name": "gym", "function": f"{CASES}.Pairs"},
            "takes actions of MultiDiscrete.*name a function .* in domains.x.environment.action",
        ),
        ({"name": "textarena", "id": "ConnectFour-v0"}, "cannot begin with one player: .*number of players has to be 2"),
        ({"name": "textarena", "id": "Chess"}, "domains.x.environment.id: 'Chess': .*not found"),
        ({"name": "reasoning_gym", "dataset": "leg_countin"}, "domains.x.environment.dataset: 'leg_countin': it cannot be made"),
        ({"name": "reasoning_gym", "dataset": "chain_sum", "args": {"min_terms": 0}}, "cannot be made: AssertionError"),
        ({"name": "verifiers", "id": "no-such-one"}, "domains.x.environment.id: 'no-such-one': Could not import"),
        ({"name": "verifiers", "id": VERIFIERS, "args": {"kind": "compared"}}, "compares the rollouts of a group"),
    ],
)
async def test_mistakes_are_told_before_the_first_episode(play: Play, section: dict[str, Any], says: str) -> None:
    """By the worker and by `roll-lite check`, which makes an environment too."""
    with pytest.raises(ValueError, match=f"(?s){says}"):
        await play(section)
    problems = await asyncio.to_thread(checked, section)
    assert len(problems) == 1 and re.search(says.replace("domains.x", "domains.guess"), problems[0], re.DOTALL), problems


def checked(section: dict[str, Any], template: str = "chat") -> list[str]:
    overrides = [f"domains.guess.environment={json.dumps(section)}", f"domains.guess.template.name={template}"]
    try:
        load_config("tiny_guess", CONFIGS, overrides, further=[check_environments])
    except ConfigError as refused:
        return list(map(str, refused.problems))
    return []


@pytest.mark.parametrize(
    "section",
    [
        LAKE,
        {"name": "textarena", "id": "GuessTheNumber-v0"},
        {"name": "reasoning_gym", "dataset": "chain_sum"},
        {"name": "openenv", "url": "http://127.0.0.1:9", "action": "text"},
        {"name": "verifiers", "id": VERIFIERS},
        {"name": "verifiers", "id": VERIFIERS, "args": {"kind": "tools"}},
    ],
    ids=lambda section: section["name"],
)
def test_check_finds_nothing_wrong(section: dict[str, Any]) -> None:
    assert checked(section) == []


def test_check_tells_that_tools_need_a_chat_template() -> None:
    [problem] = checked({"name": "verifiers", "id": VERIFIERS, "args": {"kind": "tools"}}, template="plain")
    assert "domains.guess.template.name = .plain.: tools are described to the model by a chat template" in problem.replace('"', ".")


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    "section", [LAKE, {"name": "verifiers", "id": VERIFIERS, "args": {"kind": "tools"}}], ids=lambda section: section["name"]
)
async def test_a_worker_plays(section: dict[str, Any]) -> None:
    """A worker loads the environment outside the process's main thread."""
    model = ROOT / "examples/models/tiny_chat"
    domain = DomainConfig.model_validate({"data": {"train": "none.jsonl"}, "template": {"name": "chat"}, "environment": section})
    pool = EnvironmentPool("x", domain, model)
    await pool.start()
    try:
        assert await pool.problem([Prompt("x", 0, "Play.", (5,), question="Play.")]) is None
    finally:
        pool.close()


# ---------------------------------------------------------------- TextArena and reasoning-gym


async def test_a_game_of_textarena(play: Play) -> None:
    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=5)
    number = game.game_number
    wrong = 1 if number > 10 else 20
    played = await play({"name": "textarena", "id": "GuessTheNumber-v0"}, f"[{wrong}]", f"<think>[3]</think>It is [{number}]", seed=5)
    assert "between 1 and 20 within 10 turns" in played.said[0]
    assert played.said[1] == f"The target number is {'higher' if number > wrong else 'lower'}."
    assert (played.record.rewards, played.record.metrics["invalid_move"]) == ((0, 1), 0)


async def test_a_game_plays_the_same_beside_others() -> None:
    """Buttons of the bandit pay at random."""
    from roll_lite.environments.adapters.textarena import TextArenaEpisode

    template = textarena.make("Bandit-v0")
    template.reset(num_players=1)
    courses = []
    for disturbance in (0, 3):
        episode = TextArenaEpisode(template)
        course = [(await episode.reset(Task([{"role": "user", "content": ""}], columns={"seed": 11})))[0]["content"]]
        for _ in range(12):
            for _ in range(disturbance):
                random.random()
            course.append(str((await episode.step({"role": "assistant", "content": "[red]"})).messages))
        courses.append(course)
    assert courses[0] == courses[1] and len(set(courses[0][1:])) > 1


async def test_a_task_of_reasoning_gym(play: Play) -> None:
    section = {"name": "reasoning_gym", "dataset": "chain_sum", "args": {"min_terms": 3, "max_terms": 3}}
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=4, min_terms=3, max_terms=3)[0]
    right = await play(section, f"So: <answer>{entry['answer']}</answer>", seed=4)
    assert (right.said, right.record.score) == ([f"Play.\n\n{entry['question']}"], 1.0)
    assert (await play(section, "<answer>x</answer>", seed=4)).record.score < 0.1
    assert (await play(section, "no answer", seed=4)).record.score < 0.1


# ---------------------------------------------------------------- OpenEnv


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    from tests.environments.adapter_cases import Heard, Repeat, Say

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Repeat, Say, Heard, max_concurrent_envs=4)
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(10)


async def test_an_openenv_server_over_its_connection(play: Play, server: str) -> None:
    section = {"name": "openenv", "url": server, "action": "text", "observation": "heard", "columns": ["word"]}
    for _ in range(6):  # more than the server has sessions: each episode gives its own back
        played = await play(section, "hello", "bye", seed=5, word="w")
        assert (played.said, played.record.rewards) == (["Play.\n\nseed 5, word w", "hello"], (0.5, 0.5))
        assert played.record.metrics["said"] == 2


async def test_functions_between_an_openenv_server_and_the_policy(play: Play, server: str) -> None:
    section = {"name": "openenv", "url": server, "action": f"{CASES}.say", "observation": f"{CASES}.shout"}
    played = await play(section, "well, hello", "", "good bye")
    assert played.said == ["Play.\n\nSEED 7, WORD ", "HELLO", "Say something."]
    assert played.record.metrics["invalid_actions"] == 1
    whole = await play({"name": "openenv", "url": server, "action": "text"}, "bye")
    assert '{"metadata": {}, "heard": "seed 7, word ", "said": 0}' in whole.said[0]


async def test_what_fails_on_an_openenv_server_is_no_score(play: Play, server: str) -> None:
    section = {"name": "openenv", "url": server, "action": "text", "observation": "heard"}
    crashed = (await play(section, "crash")).end
    assert isinstance(crashed, Failed) and "the server's environment failed" in crashed.cause
    unnamed = (await play({**section, "observation": "seen"})).end
    assert isinstance(unnamed, Failed) and "no field 'seen' (environment.observation); it has metadata, heard, said" in unnamed.cause
    refused = (await play({**section, "action": "words"}, "hello")).end
    assert isinstance(refused, Failed) and "VALIDATION_ERROR); the action (environment.action) was {'words': 'hello'}" in refused.cause
    nowhere = (await play({**section, "url": "http://127.0.0.1:9"})).end
    assert isinstance(nowhere, Failed) and "127.0.0.1:9" in nowhere.cause


# ---------------------------------------------------------------- verifiers

HIGHER = {"name": "verifiers", "id": VERIFIERS}


async def test_an_environment_of_verifiers_message_by_message(play: Play) -> None:
    played = await play(HIGHER, "1", "5", "3", answer=3, info={"level": 2})
    assert played.said == ["Play.", "higher", "lower"]
    assert played.shown[1] == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert (played.record.rewards, played.record.score) == ((0, 0, pytest.approx(1.2)), pytest.approx(1.2))
    assert (played.record.metrics["found"], played.record.metrics["level"], played.record.metrics["num_turns"]) == (1, 2, 3)


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 2}, FinishReason.MAX_TURNS), ({"room": 25}, FinishReason.LENGTH)], ids=["turns", "tokens"]
)
async def test_the_rubric_scores_an_episode_that_a_limit_ends(play: Play, limits: dict[str, Any], reason: FinishReason) -> None:
    turns = {"max_turns": limits.pop("max_turns", 9)}
    played = await play({**HIGHER, **turns}, "1", "2", answer=3, info={"level": 5}, **limits)
    assert isinstance(played.end, Ended) and played.end.finish_reason is reason
    assert played.record.score == pytest.approx(0.5)


async def test_a_response_of_no_text_is_a_response(play: Play) -> None:
    played = await play(HIGHER, "", answer=3, info={"level": 5})
    assert isinstance(played.end, Failed) and "invalid literal for int() with base 10: ''" in played.end.cause


async def test_tools_of_verifiers(play: Play) -> None:
    call = '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "double", "arguments": {"number": 4}\n</tool_call>'
    played = await play({**HIGHER, "args": {"kind": "tools"}}, call, bad, "It is 8.")
    assert '"name": "double"' in played.shown[0] and "Double a number." in played.shown[0]
    assert "<tool_response>\n8\n</tool_response>" in played.shown[1]
    assert "Expecting value" in played.shown[2]
    assert (played.record.score, played.record.metrics["double_calls"]) == (2.0, 1)


async def test_a_conversation_that_is_rewritten_fails_the_attempt(play: Play) -> None:
    end = (await play({**HIGHER, "args": {"kind": "forgetful"}}, "1", answer=3, info={"level": 5})).end
    assert (
        isinstance(end, Failed) and "the environment changed message 1 of 2; a conversation whose tokens train can only grow" in end.cause
    )


@pytest.mark.parametrize("gives_reward", [True, False])
async def test_an_openenv_episode_without_a_last_reward(gives_reward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing reward is no score of 0, unless the domain's reward scores the responses."""
    from openenv.core.client_types import StepResult

    from roll_lite.environments.adapters.openenv import OpenEnvEpisode

    settings = OpenEnvEnvironmentConfig.model_validate({"name": "openenv", "url": "http://127.0.0.1:9", "action": "text"})
    episode = OpenEnvEpisode(settings, lambda text: {"text": text}, str, gives_reward)
    results = [StepResult(observation="", reward=None, done=done) for done in (False, True)]
    monkeypatch.setattr(episode._client, "step", AsyncMock(side_effect=results))
    message = {"role": "assistant", "content": "Hi."}
    assert (await episode.step(message)).reward == 0.0
    if gives_reward:
        with pytest.raises(RuntimeError, match="ended the episode without a reward; to score responses, name a `reward`"):
            await episode.step(message)
    else:
        assert (await episode.step(message)).done
