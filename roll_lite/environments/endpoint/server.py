"""HTTP server with OpenAI's and Anthropic's APIs. The policy answers an agent's requests, as turns of its episode."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

from aiohttp import web
from pydantic import ValidationError
from yarl import URL

from roll_lite.environments.base import EpisodeOver, Message
from roll_lite.environments.endpoint.anthropic import Messages
from roll_lite.environments.endpoint.api import OVER, ApiRequest, ChatReply, Json, Session, as_sent
from roll_lite.environments.endpoint.openai import ChatCompletions, Completions, Responses

logger = logging.getLogger(__name__)

APIS: dict[str, type[ApiRequest]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
MAX_BODY_BYTES = 16 * 2**20
MAX_AT_ONCE = 64
MAX_EPISODE_BYTES = 4 * MAX_BODY_BYTES
"""Maximum bytes of the bodies of an episode's requests at a time."""
PING_SECONDS = 15.0
"""Interval of comments to a streaming client that waits for a response. The first one opens the stream; before it, a failure can set the
HTTP status."""
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "roll_lite"}]}


@dataclass(eq=False)
class _Episode:
    session: Session
    kept: dict[str, list[Message]] = field(default_factory=dict)
    running: set[asyncio.Future[ChatReply]] = field(default_factory=set)
    reading: int = 0
    """Requests whose body is still being read."""
    bytes: int = 0
    """Size of the bodies of all requests under way; MAX_BODY_BYTES for one of unknown size."""


class EndpointServer:
    url: str

    def __init__(self) -> None:
        self._episodes: dict[bytes, _Episode] = {}
        self._starts = asyncio.Lock()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self, host: str) -> None:
        async with self._starts:
            if not self._runner.addresses:
                await self._runner.setup()
                await web.TCPSite(self._runner, host, 0, backlog=1024).start()
                self.url = str(URL.build(scheme="http", host=host, port=self._runner.addresses[0][1]))

    def open(self, session: Session) -> str:
        key = secrets.token_urlsafe(32)
        self._episodes[_hashed(key)] = _Episode(session)
        return key

    async def settled(self, key: str) -> None:
        while running := self._episodes[_hashed(key)].running:
            await asyncio.wait(running)

    def close(self, key: str) -> None:
        for running in self._episodes.pop(_hashed(key)).running:
            running.cancel()

    async def stop(self) -> None:
        self._episodes.clear()
        await self._runner.cleanup()

    def _episode(self, http: web.Request) -> _Episode:
        scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
        for key in (bearer.strip() if scheme.lower() == "bearer" else "", http.headers.get("x-api-key", "")):
            if (episode := self._episodes.get(_hashed(key))) is not None:
                return episode
        raise web.HTTPUnauthorized(text="no running episode has this API key; use the one that the agent was started with")

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        stream: web.StreamResponse | None = None
        episode: _Episode | None = None
        size = 0
        try:
            episode = self._episode(http)
            if (http.method, http.path) == ("GET", "/v1/models"):
                return web.json_response(MODELS)
            if http.method != "POST" or http.path not in APIS:
                raise web.HTTPNotFound(text=f"{http.method} {http.path} is not served, only GET /v1/models and POST {', '.join(APIS)}")
            if len(episode.running) + episode.reading >= MAX_AT_ONCE:
                raise web.HTTPTooManyRequests(text=f"{MAX_AT_ONCE} requests of this episode wait already")
            declared = None if "Content-Encoding" in http.headers else http.content_length
            wanted = min(MAX_BODY_BYTES if declared is None else declared, MAX_BODY_BYTES)
            if episode.bytes + wanted > MAX_EPISODE_BYTES:
                raise web.HTTPTooManyRequests(text=f"this episode's requests that wait already have {episode.bytes} bytes")
            size = wanted
            episode.bytes += size
            episode.reading += 1
            try:
                given = await http.read()
                episode.bytes += len(given) - size
                size = len(given)
            finally:
                episode.reading -= 1
            episode = self._episode(http)  # it may have ended meanwhile
            asked = APIS[http.path].model_validate_json(given, context=episode.kept)
            running = asyncio.ensure_future(episode.session.respond(asked.request()))
            episode.running.add(running)
            running.add_done_callback(episode.running.discard)
            # Sample to the end even if the client disconnects (which does not cancel this method): the tokens may be trained on.
            while not (await asyncio.wait({running}, timeout=PING_SECONDS))[0]:
                if asked.stream:
                    stream = await _send(http, stream, b": waiting\n\n")
            response = asked.response(as_sent(running.result()))
            if not asked.stream:
                return web.json_response(response)
            stream = await _send(http, stream, *map(_encoded, asked.events(response)))
        except Exception as error:  # any exception of an episode becomes the client's answer
            status, body = _failure(error)
            if episode is not None and not isinstance(error, EpisodeOver):
                episode.session.refused(body["error"]["message"])
            if stream is None:
                return web.json_response(body, status=status, headers={"x-should-retry": "false"} if status == 500 else None)
            await _send(http, stream, _encoded(body))
        finally:
            if episode is not None:
                episode.bytes -= size
        return stream


def _hashed(key: str) -> bytes:
    """Hash a key, so that look-up times reveal nothing about it."""
    return sha256(key.encode(errors="surrogateescape")).digest()


async def _send(http: web.Request, stream: web.StreamResponse | None, *events: bytes) -> web.StreamResponse:
    begun = stream or web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with suppress(ConnectionError):
        if stream is None:
            await begun.prepare(http)
        await begun.write(b"".join(events))
    return begun


def _encoded(event: Json | str) -> bytes:
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


def _failure(error: Exception) -> tuple[int, Json]:
    """Return (HTTP status, body) of an error, readable by OpenAI's and Anthropic's clients."""
    message, status, code = str(error), 400, getattr(error, "code", None) if isinstance(error, ValueError) else None
    if isinstance(error, ValidationError):
        [first, *_] = error.errors(include_url=False)
        message = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "))))
    elif isinstance(error, EpisodeOver):
        code, over = OVER
        message = f"{over}. {error}"
    elif isinstance(error, web.HTTPException):
        message, status = error.text or "", error.status
    elif not isinstance(error, ValueError):
        logger.error("A request to an episode failed", exc_info=error)
        message, status = f"{type(error).__name__}: {error}", 500
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": message, "code": code, "details": {"error_code": code}}}
