"""Agents that call the policy over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Literal

import numpy as np

from roll_lite.data.samples import FinishReason
from roll_lite.environments.base import Message, Task
from roll_lite.environments.endpoint.api import OVER, ChatReply, ChatRequest, as_sent
from roll_lite.environments.episode import EpisodeFunction, Policy, Renderer
from roll_lite.environments.tool_calls import split_thoughts
from roll_lite.sandbox import kernel

READ_SECONDS = 2.0
LOOK_SECONDS = 0.1
OUTPUT_BYTES = 2**16
"""Maximum bytes kept of an agent program's output: the last ones."""


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    """Base URL for clients of OpenAI's APIs. Anthropic's client needs it without /v1."""
    api_key: str
    model: str = "policy"

    @property
    def variables(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }


Agent = Callable[[Task, Endpoint], Awaitable[Any]]
"""Function that plays an episode. It returns a reward, or an answer that the domain's reward scores."""


@dataclass(frozen=True)
class _Node:
    number: int
    ids: list[int]
    length: int
    """Tokens of the conversation up to the response's end."""


class AgentSession:
    """Conversations of one episode. A request that repeats an earlier one and its reply continues those tokens; any other starts a new
    conversation."""

    def __init__(self, policy: Policy, renderer_of: Callable[[Sequence[dict[str, Any]]], Renderer]) -> None:
        self._policy = policy
        self._renderer_of = renderer_of
        self._rendering = asyncio.Lock()
        self._nodes: dict[bytes, _Node] = {}
        self._texts: set[int] = set()
        self._conversations: dict[int, list[Message]] = {}
        self._call_ids: set[str] = set()
        self._call_numbers = count()
        self._unrepeated: set[bytes] = set()
        for name in ("refused_requests", "repeated_responses", "tool_calls", "tool_errors"):
            policy.count(name, 0)

    def refused(self, why: str) -> None:
        self._policy.count("refused_requests")
        self._policy.refusal = why

    def end(self) -> None:
        """Store the conversations in the Policy."""
        if self._conversations:
            self._policy.messages = self._conversations.pop(max(self._conversations))
            self._policy.branches = list(self._conversations.values())

    async def respond(self, request: ChatRequest) -> ChatReply:
        policy, limits = self._policy, self._policy.limits
        policy.begin_turn()
        policy.count("overridden_parameters", len(request.overridden))
        policy.check_characters(len(request.text or "") + len(_json([request.messages, request.tools])))
        node, new, digest = self._match(request)
        async with self._rendering:  # one at a time, outside the event loop, where long texts would hold up other episodes
            policy.begin_turn()  # other requests may have taken the last one
            renderer, ids, contents = await asyncio.to_thread(self._render, request, node, new)
            length = len(ids) + (0 if node is None else node.length)
            if not length:
                raise ValueError("the prompt is empty")
            room = policy.longest - length
            if room < 1:
                policy.finish(
                    FinishReason.LENGTH, f"no room is left for a response: the conversation has {length} of {policy.longest} tokens"
                )
        repeated = self._unrepeated.intersection(_said(one) for one in new if one["role"] == "assistant")
        self._unrepeated -= repeated
        policy.count("repeated_responses", len(repeated))
        most = min(limit for limit in (room, limits.max_turn_tokens, request.max_tokens) if limit is not None)
        response = await policy.sample(ids, None if node is None else node.number, most, request.stop, contents)
        sampled = _Node(response.number, response.ids.tolist(), length + len(response.ids))
        message, stop = self._reply(renderer.message(sampled.ids), request, renderer.thinking)
        reason: Literal["stop", "length"] = "length" if response.finish_reason is FinishReason.LENGTH else "stop"
        reply = ChatReply(message, reason, length, len(response.ids), stop)
        if request.text is None:
            given = as_sent(reply).message
            if not request.gives_thoughts:
                given.pop("reasoning_content", None)
            self._nodes[_digest(digest, given)] = sampled
            self._unrepeated.add(_said(given))
        elif exact := renderer.exact(sampled.ids):
            text = request.text + exact
            self._texts.add(len(text))
            self._nodes[hashlib.sha256(text.encode(errors="surrogatepass")).digest()] = sampled
        if node is not None:
            self._conversations.pop(node.number, None)
        prompt = request.messages if request.text is None else [{"role": "user", "content": request.text}]
        self._conversations[sampled.number] = [*prompt, message]
        return reply

    def _render(self, request: ChatRequest, node: _Node | None, new: list[Message]) -> tuple[Renderer, list[int], int]:
        """Return renderer, tokens, and `contents` of `Policy.sample`."""
        renderer = self._renderer_of(request.tools)
        if request.text is not None:
            ids = renderer.text(new[0]["content"], node is not None)
            return renderer, ids, len(ids)
        if node is None:
            return renderer, renderer.prompt(new), 0
        return renderer, renderer.continuation(node.ids, new), renderer.content_tokens(new)

    def _match(self, request: ChatRequest) -> tuple[_Node | None, list[Message], bytes]:
        """Find the latest sampled response that the request repeats. Return (it or None, messages after it, digest of all messages)."""
        if request.text is not None:
            node, rest = self._match_text(request.text)
            return node, [{"role": "user", "content": rest}], b""
        digest = hashlib.sha256(_json(request.tools)).digest()
        node, new = None, request.messages
        for place, message in enumerate(request.messages):
            digest = _digest(digest, message)
            if message["role"] == "assistant" and (known := self._nodes.get(digest)) is not None:
                node, new = known, request.messages[place + 1 :]
        return node, new, digest

    def _match_text(self, text: str) -> tuple[_Node | None, str]:
        """Return (last response in a prompt's text or None, the text after it)."""
        node, rest, hashed, at = None, text, hashlib.sha256(), 0
        for length in sorted(one for one in self._texts if one <= len(text)):
            hashed.update(text[at:length].encode(errors="surrogatepass"))
            at = length
            if (known := self._nodes.get(hashed.digest())) is not None:
                node, rest = known, text[length:]
        return node, rest

    def _reply(self, message: Message, request: ChatRequest, thinking: bool) -> tuple[Message, str | None]:
        """Convert a response for clients: separate thoughts, cut at the stop string, replace call ids that the episode has used. Return
        (message, stop string found or None)."""
        reasoning, content = split_thoughts(message["content"], thinking) if request.text is None else ("", message["content"])
        stops = {place: one for one in request.stop if (place := content.find(one)) >= 0}
        content = content[: min(stops, default=len(content))]
        calls, known = [], {tool["function"]["name"] for tool in request.tools}
        for call in message.get("tool_calls", []):
            self._policy.count("tool_calls")
            self._policy.count("tool_errors", "problem" in call or call["function"]["name"] not in known)
            call_id = call["id"]
            while call_id in self._call_ids:
                call_id = f"call{next(self._call_numbers):05d}"
            self._call_ids.add(call_id)
            calls.append({**call, "id": call_id})
        reply = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
        message = {name: value for name, value in reply.items() if value or name == "content"}
        return message, stops[min(stops)] if stops else None


def _digest(before: bytes, message: Message) -> bytes:
    """Digest of a conversation with `message` appended. `before`: digest without it. Outer white space is ignored: clients strip it."""
    known = {name: value.strip() if isinstance(value, str) else value for name, value in message.items() if value}
    return hashlib.sha256(before + _json(known)).digest()


def _said(message: Message) -> bytes:
    """Digest without thoughts."""
    return _digest(b"", {name: message.get(name) for name in ("content", "tool_calls")})


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def play_agent(agent: Agent, host: str, renderer_of: Callable[[Sequence[dict[str, Any]]], Renderer], gives_reward: bool) -> EpisodeFunction:
    """Build the episode function of an agent. `gives_reward`: the agent returns a reward; otherwise an answer to score."""
    from roll_lite.environments.endpoint.server import EndpointServer  # aiohttp takes a while to import

    server = EndpointServer()
    # Agents in this process and programs that it starts must not send requests for this host to an HTTP proxy.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("no_proxy", os.environ.get("NO_PROXY")), host]))

    async def play(task: Task, policy: Policy) -> float | None:
        await server.start(host)
        session = AgentSession(policy, renderer_of)
        key = server.open(session)
        result: Any = None
        try:
            reason = FinishReason.STOP  # it ended by itself, even if requests were refused
            try:
                result = await agent(task, Endpoint(f"{server.url}/v1", key))
                at_limit = policy.finish_reason is not None  # no response was sampled after the limit
            except Exception as error:
                at_limit = policy.limit is not None and (policy.finish_reason is not None or any(one in _told(error) for one in OVER))
                if policy.limit is None or not at_limit:
                    raise
                reason = policy.limit[0]
            await server.settled(key)  # abandoned requests train too: otherwise short responses would be preferred
            policy.finish_reason = reason
        finally:
            server.close(key)
            session.end()
        if gives_reward and (result is not None or not at_limit):
            try:
                return bool(result) if isinstance(result, bool | np.bool_) else float(result)
            except (TypeError, ValueError):
                expected = "expected a number, the reward; to have answers scored, name a `reward` in the domain"
                raise ValueError(f"the agent's result is {result!r:.80}; {expected}") from None
        if isinstance(result, int | float):
            raise ValueError(f"the agent's result is the number {result!r}, but the domain's `reward` scores texts; leave out one of them")
        policy.answer = None if result is None else str(result)
        return None

    return play


def _told(error: BaseException) -> str:
    """Text of an exception, those behind it, and their HTTP responses."""
    texts, errors = [], [error]
    for one in errors:
        with suppress(Exception):  # clients refuse the text of a response that was not read
            texts.append(one.response.text)  # type: ignore[attr-defined]
        texts.append(str(one))
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        errors += [new for new in (one.__cause__, one.__context__, *members) if new is not None and new not in errors]
    return " ".join(texts)


def command_agent(command: Sequence[str]) -> Agent:
    """Build an agent that runs a program: it gets the task as JSON on standard input and the endpoint in environment variables; its last
    output line is the result."""

    async def run(task: Task, endpoint: Endpoint) -> str | None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | endpoint.variables,
            start_new_session=True,
            preexec_fn=lambda: kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL),  # ends with this process
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        printed, told = bytearray(), bytearray()
        reading = [asyncio.create_task(_keep_end(*one)) for one in ((process.stdout, printed), (process.stderr, told))]
        ended = asyncio.create_task(process.wait())
        try:
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # the program need not read the task
                    process.stdin.write(json.dumps(asdict(task), default=str).encode())
                    await process.stdin.drain()
                    process.stdin.close()
                while process.returncode is None:  # Python before 3.12.4 waits for children that hold the pipes too
                    await asyncio.wait([ended], timeout=LOOK_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait(reading, timeout=READ_SECONDS)  # a child in another session may hold the pipes
        finally:
            for one in (*reading, ended):
                one.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # else pipes that such a child holds stay open
        output, errors = (bytes(one).decode(errors="replace").strip() for one in (printed, told))
        if code := process.returncode:
            raise RuntimeError(f"{command[0]} ended with code {code}: {' | '.join((errors or output).splitlines()[-3:])}")
        return output.rpartition("\n")[2] or None

    return run


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while block := await stream.read(OUTPUT_BYTES):
        kept += block
        del kept[:-OUTPUT_BYTES]
