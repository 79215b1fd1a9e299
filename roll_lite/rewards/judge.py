"""Reward `judge`: a language model behind an OpenAI-compatible endpoint reads the response and gives a verdict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.http_client import HttpClient, KeyVariable, Service, of_running_loop, shared
from roll_lite.rewards.judge_template import checked_template, filled
from roll_lite.rewards.verdict import Verdict, VerdictParser, checked_pattern, checked_scale, texts_of_choices
from roll_lite.rewards.verdict_cache import VerdictCache, cache_key

Api = Literal["chat", "completions"]
TEMPLATE = """Is the response a correct and complete answer to the question?

[Question]
{question}

[Reference answer]
{answer}

[Response]
{response}

End your reply with a line of its own, either "Verdict: yes" or "Verdict: no"."""
ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
AGAIN_TEMPERATURE = 0.7
"""Of a second question, where the first was greedy: the same one would get the same answer."""
CUT = "\0cut"
"""In place of what a judge says that did not come to its end."""
SHOWN_CHARACTERS = 200
KEPT_CHARACTERS = 1000


async def judge(
    sample: RewardInput,
    *,
    url: str | list[str] | None = None,
    server: str | None = None,
    model: str | None = None,
    api: Api = "chat",
    template: Annotated[str, AfterValidator(checked_template)] = TEMPLATE,
    system: str | None = None,
    pattern: Annotated[str | None, AfterValidator(checked_pattern)] = None,
    choices: Annotated[dict[str, float] | None, BeforeValidator(texts_of_choices)] = None,
    scale: Annotated[tuple[float, float] | None, AfterValidator(checked_scale)] = None,
    temperature: Annotated[float, Field(ge=0)] = 0.0,
    max_tokens: Annotated[int, Field(gt=0)] | None = 256,
    stop: Sequence[str] = (),
    extra_body: dict[str, Any] | None = None,
    asks: Annotated[int, Field(gt=0)] = 2,
    concurrency: Annotated[int, Field(gt=0)] = 64,
    timeout_s: Annotated[float, Field(gt=0)] = 20.0,
    retries: Annotated[int, Field(ge=0)] = 3,
    api_key_env: KeyVariable = None,
    api_key_header: str = "Authorization",
    trust_env: bool = False,
    cache_entries: Annotated[int, Field(ge=0)] = 10_000,
    cache_file: Path | None = None,
    fingerprint: str = "",
) -> Score:
    """The verdict as a number.

    url, model: the endpoint's base, such as https://host/v1, or several, and the model's name there; or `server`, one of the judges that
    the run starts itself. template: {prompt}, {question}, {response}, {answer} and {column} are filled in, {{ and }} stay braces.
    pattern, choices, scale: see VerdictParser; yes and no where all are absent. A verdict that cannot be read, or that was cut at
    max_tokens, is asked for again, `asks` times in all, then the sample has failed. Greedy answers are cached: `fingerprint` tells models
    of one name apart.
    """
    if url is None or model is None:
        raise RewardFailed(_incomplete(server, url))
    urls = (url,) if isinstance(url, str) else tuple(url)
    settings = Settings(
        service=Service(
            "judge", tuple(_endpoint(one, api) for one in urls), api_key_env, api_key_header, concurrency, timeout_s, retries, trust_env
        ),
        identity=(server, fingerprint) if server is not None else (*sorted(urls), fingerprint),
        cache_entries=cache_entries,
        cache_file=cache_file,
    )
    questions = of_running_loop(("judge", settings), lambda: _questions(settings))
    text = filled(template, sample)
    request: dict[str, Any] = {"model": model, "temperature": temperature}
    request |= {"max_tokens": max_tokens} if max_tokens is not None else {}
    request |= {"stop": list(stop)} if stop else {}
    request |= _as_chat(text, system) if api == "chat" else {"prompt": f"{system}\n\n{text}" if system else text}
    parser = _parser(pattern, None if choices is None else tuple(choices.items()), scale)
    verdict, said = await _verdict(questions, request | (extra_body or {}), parser, asks)
    return Score(verdict.value, None, {"extracted": verdict.extracted, "verdict": said[:KEPT_CHARACTERS]})


@dataclass(frozen=True)
class Settings:
    service: Service
    identity: tuple[str, ...]
    """Of the model, beside its name: where it answers, or what the run serves under that name."""
    cache_entries: int
    cache_file: Path | None


@dataclass
class Questions:
    """Asks each greedy question once, whoever needs the answer."""

    client: HttpClient
    identity: tuple[str, ...]
    cache: VerdictCache
    _asked: dict[str, asyncio.Task[str]] = field(default_factory=dict)

    async def ask(self, request: Mapping[str, Any]) -> tuple[str, str]:
        """(what the judge says, the key under which it may be remembered, "" for what is sampled)."""
        if request["temperature"] > 0:
            return await self._send(request), ""
        key = cache_key(identity=self.identity, request=request)
        known = self.cache.get(key)
        if known is not None:
            return known, key
        if key not in self._asked:
            task = asyncio.get_running_loop().create_task(self._send(request))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # Shielded: the time-out of one sample must not take the answer from the others that wait for it.
        return await asyncio.shield(self._asked[key]), key

    def _forget(self, key: str, task: asyncio.Task[str]) -> None:
        del self._asked[key]
        if not task.cancelled():
            task.exception()  # seen: nobody may be waiting any more

    async def _send(self, request: Mapping[str, Any]) -> str:
        answer, url = await self.client.post(request)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            is_cut = choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError):
            raise RewardFailed(
                f"reward judge: {url}: no choices[0] with a message or text in the answer: {json.dumps(answer):.200}"
            ) from None
        if text is not None and not isinstance(text, str):
            raise RewardFailed(f"reward judge: {url}: the message's content is no string: {text!r:.80}")
        return CUT if is_cut else text or ""


async def _verdict(questions: Questions, request: dict[str, Any], parser: VerdictParser, asks: int) -> tuple[Verdict, str]:
    said = ""
    for number in range(asks):
        again = {"temperature": max(request["temperature"], AGAIN_TEMPERATURE)} if number else {}
        said, key = await questions.ask(request | again)
        verdict = None if said == CUT else parser(said)
        if verdict is not None:
            if key:
                questions.cache.put(key, said)
            return verdict, said
    asked = f"asked {asks} times, the judge" if asks > 1 else "the judge"
    problem = "did not finish within max_tokens" if said == CUT else f"gave no verdict that can be read: {said[:SHOWN_CHARACTERS]!r}"
    raise RewardFailed(f"reward judge: {asked} {problem}")


def _questions(settings: Settings) -> Questions:
    return Questions(shared(settings.service), settings.identity, VerdictCache(settings.cache_entries, settings.cache_file))


@lru_cache(maxsize=64)
def _parser(pattern: str | None, choices: tuple[tuple[str, float], ...] | None, scale: tuple[float, float] | None) -> VerdictParser:
    return VerdictParser(pattern, None if choices is None else dict(choices), scale)


def _incomplete(server: str | None, url: str | list[str] | None) -> str:
    if server is not None:
        return f"reward judge: server {server!r} has no address here: only a run starts the judges of its configuration; give url and model"
    return "reward judge: needs " + ("url and model, or server" if url is None else "model, its name at the endpoint")


def _endpoint(url: str, api: Api) -> str:
    url = url.rstrip("/")
    return url if url.endswith(ENDPOINTS[api]) else url + ENDPOINTS[api]


def _as_chat(text: str, system: str | None) -> dict[str, Any]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, {"role": "user", "content": text}]}
