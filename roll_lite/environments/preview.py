"""Command `roll-lite reward --episodes N`: play and show episodes of a domain's environment, without engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from roll_lite.config.schema.domains import ENVIRONMENT_REWARD, DomainConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.prompts import Split, load_prompts
from roll_lite.data.samples import EpisodeRecord, FinishReason, Prompt, RewardInput, Score, Transcript
from roll_lite.data.stable_hash import stable_hash
from roll_lite.data.templates import Tokenizer, load_tokenizer
from roll_lite.environments.build import player_of, task_of
from roll_lite.environments.episode import Answer, Ask, Begin, Ended, Failed, Player
from roll_lite.rewards.environment import EnvironmentReward
from roll_lite.rewards.running.reward_process import RewardProcess

COLORS = {"assistant": "cyan", "tool": "yellow", "system": "dim", "user": "white"}
WAIT_SECONDS = 5.0


class LocalPolicy:
    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, domain: DomainConfig) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = domain.sampling
        self._end_ids = [tokenizer.eos_token_id, *domain.sampling.stop_token_ids]
        self._rows: dict[int, list[int]] = {}

    @torch.inference_mode()
    def respond(self, ask: Ask, room: int) -> Answer:
        sampling = self._sampling
        row = [*(self._rows[ask.after] if ask.after is not None else []), *np.frombuffer(ask.ids, np.int32).tolist()]
        chance: dict[str, Any] = (
            {"do_sample": False}
            if sampling.temperature == 0
            else {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
            }
        )
        most = room if ask.most is None else ask.most
        if stop := [*sampling.stop, *ask.stop]:
            chance |= {"stop_strings": stop, "tokenizer": self._tokenizer}
        ids = torch.tensor([row], device=self._model.device)
        tokens = self._model.generate(ids, max_new_tokens=most, eos_token_id=self._end_ids, pad_token_id=self._end_ids[0], **chance)
        response = tokens[0, len(row) :].tolist()
        self._rows[ask.number] = [*row, *response]
        stopped = len(response) < most or response[-1] in self._end_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Answer(ask.episode, ask.number, np.array(response, np.int32).tobytes(), reason)


def preview_episodes(config: RunConfig, name: str, split: Split, episodes: int) -> int:
    """Play and print episodes. Return the exit code: 1 if one failed."""
    domain, path = config.domains[name], f"domains.{name}"
    if domain.environment is None:
        raise ValueError(f"--episodes: {path} has no environment; leave it out to score responses")
    disable_progress_bar()
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(name, domain, split, tokenizer, config.domains, episodes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="auto").to(device).eval()
    torch.manual_seed(stable_hash(config.seed, "episodes") % 2**31)
    console = Console(highlight=False, emoji=False, markup=False)

    async def play_all() -> int:
        player, failed = player_of(domain, tokenizer, path, "127.0.0.1"), 0
        for number in range(min(episodes, len(prompts))):
            end = await _played(domain, prompts[number], player, LocalPolicy(model, tokenizer, domain))
            failed += isinstance(end, Failed)
            for line in _shown(domain, path, prompts[number], end):
                console.print(line, soft_wrap=True)
        return failed

    return int(asyncio.run(play_all()) > 0)


async def _played(domain: DomainConfig, prompt: Prompt, player: Player, policy: LocalPolicy) -> Ended | Failed:
    room = domain.sampling.max_tokens
    player.tell([Begin(0, task_of(domain, prompt, stable_hash("preview", prompt.uid)), room)])
    while True:
        for event in await player.events(WAIT_SECONDS):
            if not isinstance(event, Ask):
                return event
            answer = await asyncio.to_thread(policy.respond, event, room)
            room -= len(answer.ids) // 4 + (len(event.ids) // 4 if event.after is not None else 0)
            player.tell([answer])


def _shown(domain: DomainConfig, path: str, prompt: Prompt, end: Ended | Failed) -> Iterator[Text]:
    if isinstance(end, Failed):
        yield Text(f"\n--- prompt {prompt.uid}: failed: {end.cause}", style="red")
        return
    record = end.record
    score = _score(domain, path, prompt, end)
    verdict = score if isinstance(score, str) else f"score {score.value:g}, {'correct' if score.is_correct else 'not correct'}"
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in record.metrics.items())
    ending = f", ended by {end.finish_reason}" if end.finish_reason else ""
    yield Text(f"\n--- prompt {prompt.uid}: {verdict}{ending} ({numbers})", style="bold")
    for messages in (*record.branches, record.messages):
        yield from _conversation(messages, record, is_only=not record.branches)


def _conversation(messages: Sequence[dict[str, Any]], record: EpisodeRecord, is_only: bool) -> Iterator[Text]:
    turn = len(record.rewards) - sum(message["role"] == "assistant" for message in messages)  # the prompt may contain assistant messages
    for message in messages:
        role, content = message["role"], str(message["content"]).strip()
        line = Text(f"{role:>9}: ", style="bold").append(content, style=COLORS.get(role, ""))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            line.append(f" {function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})", style="magenta")
        if role == "assistant":
            if is_only and turn >= 0 and record.rewards[turn]:
                line.append(f"  [{record.rewards[turn]:+g}]", style="green")
            turn += 1
        yield line
    if not is_only:
        yield Text("")


def _score(domain: DomainConfig, path: str, prompt: Prompt, end: Ended) -> Score | str:
    text = Transcript(episode=end.record).last_text
    item = RewardInput.of(prompt, text, end.finish_reason or FinishReason.STOP, end.record)
    if domain.reward.name == ENVIRONMENT_REWARD and not domain.reward.terms:
        return EnvironmentReward()(item)
    with closing(RewardProcess(domain.reward, f"{path}.reward")) as reward:
        return reward.score(item)[0]
