"""Token proof: whatever an agent does with the text of responses, every sampled token trains exactly once, with the id, log-prob and weight
version that it was sampled with, behind exactly the tokens that the engine saw before it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
from support_dumps import assert_same

from roll_lite.data.dumps import load_dump, write_dump
from roll_lite.data.samples import (
    Author,
    Branch,
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Sample,
    SampleGroup,
    SampleId,
    SampleOutcome,
    Sampling,
    Score,
    TokenRow,
    Transcript,
    Turn,
    VersionSpan,
)
from roll_lite.environments.agents import AgentSession
from roll_lite.environments.base import EpisodeOver, Message
from roll_lite.environments.endpoint.api import ChatReply, ChatRequest, as_sent
from roll_lite.environments.episode import Answer, Ask, Limits, Policy
from roll_lite.environments.rendering import ChatRenderer
from roll_lite.scheduler.runner import Ask as AskEngine
from roll_lite.scheduler.runner import Conversation
from roll_lite.workers.rollout_output import rows_of
from roll_lite.workers.token_blocks import TokenRecord, context_record, token_block
from tests.environments.test_rendering import FAMILIES, TOOLS

SAID = ("The answer", " is 42.", "\n\n", " ", "Ünïcödé 日本語 🎉", '"', "\\", "<b>", "e\u0301")
NASTY = (
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|eot_id|>",
    "<|python_tag|>",
    "[INST]",
    "</s>",
    "[TOOL_CALLS]",
    "<tool_call>",
    "<think>",
    "</think>",
)
CALLS = {
    "qwen2.5": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3.1": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "mistral-nemo": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefgh1"}]',
}
ROOM = 4000


class Sampled(NamedTuple):
    before: list[int]
    """Tokens that the engine saw."""
    ids: list[int]
    log_probs: list[float]
    versions: list[int]


class Engine:
    """Samples texts of a random model. Log-probs are numbered through, so each tells which token it belongs to. `special`: ids of special
    tokens that it writes in mid-text, as a model may."""

    def __init__(
        self, chance: random.Random, eos: int, encode: Callable[[str], list[int]], family: str, special: Sequence[int] = ()
    ) -> None:
        self.chance, self.eos, self.encode, self.family, self.special = chance, eos, encode, family, special
        self.sampled: list[Sampled] = []
        self.tokens = 0

    async def ask(self, request: GenerationRequest, _: Turn | None) -> Turn:
        if self.chance.random() < 0.3:
            await asyncio.sleep(0)
        context = [] if request.context is None else [context_record(request, TokenRecord.read(request.context.block, request.context.row))]
        before = TokenRecord.joined([*context, TokenRecord.given(request.prompt_ids)])
        ids = self.response()[: request.sampling.max_tokens]
        version = len(self.sampled) // 3
        log_probs = self.say(before.ids.tolist(), ids, [version] * len(ids))
        chosen = TokenRecord.chosen(Completion(request.request_id, tuple(ids), log_probs))
        block = token_block([TokenRecord.joined([before, chosen])])
        reason = FinishReason.LENGTH if len(ids) == request.sampling.max_tokens else FinishReason.STOP
        row = TokenRow(block, 0, len(before) + len(ids))
        spans = (VersionSpan(0, version),)
        return Turn(request.request_id, len(ids), "", reason, spans, tokens=row, ids=np.array(ids, np.int32).tobytes())

    def say(self, before: list[int], ids: list[int], versions: list[int]) -> tuple[float, ...]:
        """Keep what was sampled; return the log-probs."""
        log_probs = [float(-number) for number in range(self.tokens + 1, self.tokens + 1 + len(ids))]
        self.tokens += len(ids)
        self.sampled.append(Sampled(before, ids, log_probs, versions))
        return tuple(log_probs)

    def response(self) -> list[int]:
        chance = self.chance
        text = "".join(chance.choices(SAID, k=chance.randint(0, 5)))
        if self.family == "qwen3" and chance.random() < 0.7:
            text = f"<think>\n{text}</think>\n\n{chance.choice(SAID)}"
        for _ in range(chance.choice((0, 0, 1, 2))):
            text += CALLS[self.family] if chance.random() < 0.8 else CALLS[self.family][:-9]
        # Token by token, as a model may write a text: not as a tokenizer would.
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)] if chance.random() < 0.5 else [text]
        ids = [one for piece in pieces for one in self.encode(piece)]
        for _ in range(chance.choice((0, 0, 1, 2)) if self.special else 0):
            ids.insert(chance.randint(0, len(ids)), chance.choice(self.special))
        return [*ids, *([self.eos] if chance.random() < 0.8 or not ids else [])]


class Agent:
    """Sends requests that follow from earlier ones in every way that agents have: as a program would, which knows messages only."""

    def __init__(self, chance: random.Random, family: str, session: AgentSession, asks: dict[Any, Ask]) -> None:
        self.chance, self.family, self.session, self.asks = chance, family, session, asks
        self.answered: list[tuple[ChatRequest, Message, int]] = []
        """Request, reply as it was sent, and number of the response."""
        self.refused = self.texts_continued = 0

    async def run(self) -> None:
        for _ in range(self.chance.randint(2, 6)):
            requests = [self.request() for _ in range(self.chance.choice((1, 1, 1, 2, 3)))]
            for error in filter(None, await asyncio.gather(*map(self.send, requests), return_exceptions=True)):
                if isinstance(error, EpisodeOver):
                    return
                raise error

    async def send(self, request: ChatRequest) -> None:
        expected = continued_by(request, self.answered) if request.text is None else self.continued_text(request.text)
        node, new, _ = self.session._match(request)
        try:
            reply: ChatReply = await self.session.respond(request)
        except ValueError:  # the template refuses these roles in this order
            self.refused += 1
            return
        asked = self.asks[asyncio.current_task()]
        assert asked.after in (expected or {None}), "the longest conversation that the messages begin with"
        self.answered.append((request, as_sent(reply).message, asked.number))
        if request.text is None:
            self.check_given(asked, request, None if node is None else node.ids, new)
        self.texts_continued += request.text is not None and asked.after is not None

    def continued_text(self, text: str) -> set[int]:
        """Responses that end the longest earlier text, special tokens included, that this one begins with."""
        ids, decode = {node.number: node.ids for node in self.session._nodes.values()}, self.session._renderer_of([])._tokenizer.decode
        wholes = [
            (f"{earlier.text}{decode(ids[number])}", number)
            for earlier, _, number in self.answered
            if earlier.text is not None and number in ids
        ]
        longest = max((len(whole) for whole, _ in wholes if text.startswith(whole)), default=0)
        return {number for whole, number in wholes if len(whole) == longest and text.startswith(whole)}

    def check_given(self, ask: Ask, request: ChatRequest, before: list[int] | None, new: list[Message]) -> None:
        """What others wrote never becomes an added token: there are as many as with harmless texts."""
        renderer = self.session._renderer_of(request.tools)
        assert isinstance(renderer, ChatRenderer)
        ids = renderer.prompt(new) if before is None else renderer.continuation(before, new)
        assert np.frombuffer(ask.ids, np.int32).tolist() == ids
        if not any(one in message["content"] for message in new for one in NASTY):
            return
        texts: dict[str, str] = {}  # equal ones stay equal: Mistral's template compares messages
        for message in new:
            texts.setdefault(message["content"], f"Q{len(texts)}")
        harmless = [message if message["role"] == "assistant" else {**message, "content": texts[message["content"]]} for message in new]
        added = np.array(sorted(renderer._tokenizer.get_added_vocab().values()))
        plain = renderer.prompt(harmless) if before is None else renderer.continuation(before, harmless)
        assert np.isin(ids, added).sum() == np.isin(plain, added).sum(), (new, request.tools)

    def request(self) -> ChatRequest:
        chance = self.chance
        tools = chance.choice(([], TOOLS))
        if not self.answered or chance.random() < 0.1:  # a prompt of its own: a sub-agent, or a compacted history
            compacted = f"Qsummary: {chance.choice(self.answered)[1]['content']}" if self.answered else None
            message = self.said("user") if compacted is None else {"role": "user", "content": compacted}
            return self.limited(asking([*self.system(), message], tools))
        earlier, reply, _ = chance.choice(self.answered)
        kind = chance.choice(("go on", "go on", "go on", "retry", "edit", "drop thoughts", "other tools", "raw text"))
        if kind == "retry":
            return earlier
        if kind == "raw text" or earlier.text is not None:
            end = self.session._renderer_of([])._tokenizer.eos_token
            ends = chance.choice(("", " and on", end, f"{end} and on"))
            text = "Raw text to complete." if earlier.text is None else f"{earlier.text}{reply['content']}{ends}"
            return self.limited(ChatRequest([], [], None, (), text=text))
        messages = [*earlier.messages, reply, *self.answers(reply)]
        if kind == "edit":
            place = chance.randrange(len(messages))
            messages[place] = {**messages[place], "content": f"Q{chance.random()}"}
        elif kind == "drop thoughts":
            messages = [{name: value for name, value in message.items() if name != "reasoning_content"} for message in messages]
        return self.limited(asking(messages, tools if kind == "other tools" else earlier.tools))

    def limited(self, request: ChatRequest) -> ChatRequest:
        """Some requests limit the response, or name strings that end it."""
        most = self.chance.choice((None, None, 1, 7))
        return replace(request, max_tokens=most, stop=self.chance.choice(((), (), (".",))))

    def answers(self, reply: Message) -> list[Message]:
        calls = reply.get("tool_calls", [])
        return [self.said("tool", tool_call_id=call["id"], name=call["function"]["name"]) for call in calls] or [self.said("user")]

    def system(self) -> list[Message]:
        return [self.said("system")] if self.chance.random() < 0.3 and self.family != "mistral-nemo" else []

    def said(self, role: str, **more: Any) -> Message:
        return {"role": role, "content": "Q" + "".join(self.chance.choices(SAID + NASTY, k=self.chance.randint(0, 5))), **more}


def asking(messages: list[Message], tools: list[dict[str, Any]]) -> ChatRequest:
    return ChatRequest(messages, tools, None, ())


async def played(
    chance: random.Random,
    family: str,
    ask: AskEngine,
    renderers: Callable[[Any], ChatRenderer],
    sampling: Sampling,
    limits: Limits,
    name: str,
) -> tuple[Agent, list[Ask], Transcript]:
    """Play one conversation of an agent; `name` begins its requests' ids."""
    conversation = Conversation(ask, name, sampling, wants_ids=True)
    asks: dict[Any, Ask] = {}
    under_way: list[asyncio.Task[None]] = []

    async def answer(ask: Ask) -> None:
        turn = await conversation.respond(np.frombuffer(ask.ids, np.int32).tolist(), ask.number, ask.after, ask.most, ask.stop)
        policy.answered(Answer(ask.episode, ask.number, turn.ids, turn.finish_reason))

    def hear(ask: Ask) -> None:
        asks[asyncio.current_task()] = ask
        under_way.append(asyncio.create_task(answer(ask)))

    policy = Policy(0, renderers([]), limits, sampling.max_tokens, hear)
    session = AgentSession(policy, renderers)
    agent = Agent(chance, family, session, asks)
    await agent.run()
    await asyncio.gather(*under_way)
    session.end()
    record = policy.record()
    conversation.end(record, policy.finish_reason)
    transcript = conversation.transcript()
    assert record.metrics["rows"] == len(transcript.rows)
    counted = {author: sum(one.length for row in transcript.rows for one in row.segments if one.author is author) for author in Author}
    assert record.metrics["policy_tokens"] == counted[Author.POLICY]
    assert 0 <= record.metrics["template_tokens"] <= record.metrics["environment_tokens"] == counted[Author.ENVIRONMENT]
    return agent, [*asks.values()], transcript


def renderers_of(tokenizer: Any) -> Callable[[Any], ChatRenderer]:
    @cache
    def by_tools(tools: str) -> ChatRenderer:
        return ChatRenderer(tokenizer, None, {}, json.loads(tools), "template")

    return lambda tools: by_tools(json.dumps(tools))


class ReadRow(NamedTuple):
    """Row of a dump."""

    tokens: TokenRow | None
    prompt_length: int
    response_length: int
    policy_tokens: int
    versions: Sequence[VersionSpan]


def check(engine: Engine, rows: Sequence[Branch | ReadRow]) -> None:
    by_first = {sampled.log_probs[0]: sampled for sampled in engine.sampled}
    trained: list[float] = []
    for row in rows:
        assert row.tokens is not None
        record = TokenRecord.read(row.tokens.block, row.tokens.row)
        assert row.prompt_length + row.response_length == len(record)
        assert row.policy_tokens == int(record.mask.sum()) and not record.log_probs[~record.mask].any()
        starts = {row.prompt_length + span.start: span.version for span in row.versions}
        versions, position = list[int | None](), 0
        for at in range(len(record)):
            versions.append(starts.get(at, versions[-1] if versions else None))
        while position < len(record):
            if not record.mask[position]:
                position += 1
                continue
            sampled = by_first[float(record.log_probs[position])]
            end = position + len(sampled.ids)
            assert record.mask[position:end].all() and record.ids[position:end].tolist() == sampled.ids, "its own ids"
            assert record.log_probs[position:end].tolist() == sampled.log_probs, "their own log-probs"
            assert versions[position:end] == sampled.versions, "their own versions"
            assert record.ids[:position].tolist() == sampled.before, "behind the tokens that the engine saw"
            trained += sampled.log_probs
            position = end
    assert sorted(trained) == sorted(one for sampled in engine.sampled for one in sampled.log_probs), "each token once"


def continued_by(request: ChatRequest, answered: list[tuple[ChatRequest, Message, int]]) -> set[int]:
    """Responses that end the longest conversation that the request's messages begin with, compared as lists."""
    found: dict[int, set[int]] = {}
    for earlier, reply, number in answered:
        whole = [*earlier.messages, reply]
        if earlier.text is None and earlier.tools == request.tools and stripped(request.messages[: len(whole)]) == stripped(whole):
            found.setdefault(len(whole), set()).add(number)
    return found[max(found)] if found else set()


def stripped(messages: list[Message]) -> list[str]:
    return [
        json.dumps({name: value.strip() if isinstance(value, str) else value for name, value in message.items() if value}, sort_keys=True)
        for message in messages
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversations", [500, pytest.param(25_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
async def test_every_sampled_token_trains_once(conversations: int, family: str, tokenizer_of: Callable[[str], Any]) -> None:
    tokenizer = tokenizer_of(family)
    encode = cache(lambda text: tokenizer.encode(text, add_special_tokens=False))  # the engine's, which costs most of the time

    special = sorted(set(tokenizer.get_added_vocab().values()) - {tokenizer.eos_token_id})
    renderers = renderers_of(tokenizer)
    rows = continued = forked = responses = refused = wrote = texts = 0
    for seed in range(conversations):
        chance = random.Random(f"{seed} {family}")
        engine = Engine(chance, tokenizer.eos_token_id, encode, family, special)
        limits = Limits(chance.choice((4, 20)), 60.0, 1000)
        agent, asks, transcript = await played(chance, family, engine.ask, renderers, Sampling(1.0, ROOM), limits, "proof")
        check(engine, transcript.rows)
        rows += len(transcript.rows)
        responses += len(engine.sampled)
        wrote += sum(bool(set(sampled.ids[:-1]) & set(special)) for sampled in engine.sampled)
        refused += agent.refused
        texts += agent.texts_continued
        parents = [ask.after for ask in asks if ask.after is not None]
        continued += len(set(parents))
        forked += len(parents) - len(set(parents))
    assert min(rows - conversations, continued, forked) > conversations / 10, (rows, continued, forked)
    assert refused < responses / 4 < wrote
    assert texts > conversations / 50


async def test_a_dump_gives_every_branch_back(tmp_path: Path, tokenizer_of: Callable[[str], Any]) -> None:
    """What a replay trains passes the same proof: rows of the same samples, with ids, log-probs and versions as they were sampled."""
    tokenizer = tokenizer_of("qwen3")
    encode = cache(lambda text: tokenizer.encode(text, add_special_tokens=False))
    renderers, engines, groups = renderers_of(tokenizer), dict[tuple[int, int], Engine](), []
    for group in range(10):
        samples = []
        for index in range(2):
            chance = random.Random(f"{group} {index}")
            engine = engines[group, index] = Engine(chance, tokenizer.eos_token_id, encode, "qwen3")
            _, _, transcript = await played(chance, "qwen3", engine.ask, renderers, Sampling(1.0, ROOM), Limits(20, 60.0, 1000), "proof")
            prompt = Prompt("add", group, "", ())
            samples.append(
                Sample(SampleId("add", group, 0, group, index), prompt, transcript, SampleOutcome.ACCEPTED, Score(chance.random()))
            )
        groups.append(SampleGroup(group, "add", tuple(samples)))
    rows = rows_of(groups, {"add": 1.0})
    path = tmp_path / "step_000001.parquet"
    write_dump(path, groups, rows, list, {"step": 1, "config": {}, "tokenizer": "", "stats": {"domains": {}}})
    dumped = load_dump(path)
    assert_same(dumped.select(rows.keys()), rows)
    frame = pandas.read_parquet(path).set_index("sample")
    found = dict[tuple[int, int], list[ReadRow]]()
    for row, number in enumerate(dumped.tensor("sample").tolist()):
        line = frame.loc[number]
        ids, mask, log_probs = (dumped.ragged(name).row(row).numpy() for name in ("input_ids", "response_mask", "rollout_log_probs"))
        tokens = TokenRow(token_block([TokenRecord(ids, mask, np.append(np.float32(0), log_probs))]), 0, len(ids))
        spans = [VersionSpan(span["start"], span["version"]) for span in line["versions"]]
        assert (spans[0].version, spans[-1].version) == (line["min_version"], line["max_version"])
        read = ReadRow(tokens, line["prompt_length"], line["response_length"], line["policy_tokens"], spans)
        found.setdefault((line["group"], line["index"]), []).append(read)
    assert found.keys() == engines.keys() and sum(len(one) > 1 for one in found.values()) > 10
    for name, engine in engines.items():
        check(engine, found[name])
