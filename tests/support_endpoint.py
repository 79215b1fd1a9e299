"""An episode that answers the endpoint's requests from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

from roll_lite.environments.endpoint.api import ChatReply, ChatRequest
from roll_lite.environments.endpoint.server import EndpointServer

WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
"""Schema of a tool, without a frame."""


def says(
    content: str, *calls: dict[str, Any], reasoning: str | None = None, finish: Literal["stop", "length", "tool_calls"] = "stop"
) -> ChatReply:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return ChatReply(message | ({"reasoning_content": reasoning} if reasoning else {}), finish, 7, 5)


def call(name: str = "weather", arguments: dict[str, Any] | None = None, call_id: str = "call00001", **more: Any) -> dict[str, Any]:
    arguments = {"city": "Paris"} if arguments is None else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


class ScriptedSession:
    """Gives the replies of a script one after the other, and remembers the requests. An exception in the script is raised."""

    def __init__(self, *script: ChatReply | Exception | Callable[[ChatRequest], ChatReply]) -> None:
        self.script = list(script)
        self.requests: list[ChatRequest] = []
        self.finished = 0
        self.refusals: list[str] = []
        self.gate = asyncio.Event()
        """Responses wait for it."""
        self.gate.set()
        self.asked = asyncio.Semaphore(0)
        """Released once for each request."""

    def refused(self, why: str) -> None:
        self.refusals.append(why)

    async def respond(self, request: ChatRequest) -> ChatReply:
        self.requests.append(request)
        self.asked.release()
        await self.gate.wait()
        self.finished += 1
        reply = self.script.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, ChatReply) else reply(request)


@asynccontextmanager
async def serving(session: ScriptedSession) -> AsyncIterator[tuple[EndpointServer, str]]:
    """A server with one episode, and its key."""
    server = EndpointServer()
    await server.start("127.0.0.1")
    try:
        yield server, server.open(session)
    finally:
        await server.stop()
