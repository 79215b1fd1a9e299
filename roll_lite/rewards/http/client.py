"""JSON over HTTP to one service at one or several URLs: least-loaded, with retries, and with causes that name no secret."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt

from roll_lite.config.problems import HIDDEN, Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.rewards.base import ResponseSuspected, RewardFailed
from roll_lite.rewards.reward_type import RewardType, Unshown, too_slow

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

T = TypeVar("T")

BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0
CONNECT_S = 5.0
LARGEST_ANSWER = 64 * 2**20
SHOWN_CHARACTERS = 200
TOO_MANY, LEAST_SERVER_ERROR, REQUEST_TIMEOUT = 429, 500, 408
ABOUT_THE_CONTENT = (400, 413, 422, 500)
"""Status codes with which services refuse what a request holds: too long, malformed, forbidden, or it made them raise."""
SHORTEST_SECRET = 8


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_set(variable: str) -> str:
    """Some write the key itself where its variable's name belongs: what is here is never repeated."""
    if not VARIABLE.fullmatch(variable):
        raise ValueError("is no name of an environment variable; the key itself must not stand here")
    if not os.environ.get(variable, "").strip():
        raise ValueError("there is no environment variable of this name; set it to the key, then start")
    return variable


def _are_urls(given: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Secrets in addresses are told for all of a configuration, in config/checks/secrets.py."""
    for url in (given,) if isinstance(given, str) else given:
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ValueError("is no URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is no URL of the form http://host:port/path or https://...")
    if not given:
        raise ValueError("needs at least one address")
    return given


KeyVariable = Annotated[str, AfterValidator(_is_set), Unshown()]
"""Name of the environment variable with a key."""
Addresses = Annotated[str | tuple[str, ...], AfterValidator(_are_urls), Unshown()]
"""One URL or several."""


@dataclass(frozen=True)
class Service:
    """Where a service is and how it is asked. Equal ones share a client."""

    reward: str
    """Name of the reward, for causes."""
    urls: tuple[str, ...]
    api_key_env: str | None = None
    """Environment variable with the key. Its value is read in the process that sends the requests and stays there."""
    api_key_header: str = "Authorization"
    concurrency: int = 64
    """Requests under way at the same time, from this process."""
    timeout_s: float = 20.0
    """Of one attempt."""
    retries: int = 3
    trust_env: bool = False
    """Honour HTTP_PROXY and the like."""


class Refused(ResponseSuspected):
    """The service answered that it cannot handle this request."""


@dataclass
class _Endpoint:
    url: str
    outstanding: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0

    def available(self, now: float) -> bool:
        """One that has failed is tried by a single request, once it has rested."""
        return self.failures == 0 or (now >= self.rests_until and self.outstanding == 0)

    def rest(self, seconds: float | None = None) -> None:
        self.failures += 1
        self.rests_until = time.monotonic() + (min(BACKOFF_S * 2**self.failures, LONGEST_BACKOFF_S) if seconds is None else seconds)


@dataclass
class _Trouble:
    """Why an attempt failed in a way that may pass."""

    text: str
    is_answer: bool = False
    wait_s: float | None = None
    """What the service asks for."""
    elsewhere: bool = False
    """Worth another attempt only where another URL works: a service that is too slow is not asked twice for the same."""


@dataclass
class HttpClient:
    """Belongs to one event loop: `shared` finds the one of the running loop. Connections live on between calls."""

    service: Service
    _endpoints: list[_Endpoint] = field(init=False)
    _limit: asyncio.Semaphore = field(init=False)
    _session: aiohttp.ClientSession | None = None
    _open: AsyncIterator[aiohttp.ClientSession] | None = None

    def __post_init__(self) -> None:
        if not self.service.urls:
            raise RewardFailed(f"reward {self.service.reward}: it has no URL")
        self._endpoints = [_Endpoint(url) for url in self.service.urls]
        self._limit = asyncio.Semaphore(self.service.concurrency)

    async def post(self, payload: Any, retries: int | None = None) -> tuple[Any, str]:
        """(the answer's JSON, the URL that gave it, fit to be shown). Refused for an error that the service answers with, RewardFailed
        where no answer comes; both after the retries where another attempt may help."""
        name = self.service.reward
        body = self._encoded(payload)
        attempts = 1 + (self.service.retries if retries is None else retries)
        troubles: dict[str, str] = {}
        async with self._limit:
            for attempt in range(attempts):
                endpoint = self._choose()
                result = await self._attempt(endpoint, body)
                if not isinstance(result, _Trouble):
                    endpoint.failures = 0
                    return result, shown(endpoint.url)
                endpoint.rest(result.wait_s)
                troubles[shown(endpoint.url)] = result.text
                if not any(one.available(time.monotonic()) for one in self._endpoints):
                    if result.elsewhere or attempt == attempts - 1:
                        break
                    await asyncio.sleep(max(result.wait_s or 0.0, _backoff(attempt)))
        causes = "; ".join(f"{url} {text}" for url, text in troubles.items())
        made = f"{attempt + 1} attempt{'s' if attempt else ''}"
        raise (Refused if result.is_answer else RewardFailed)(f"reward {name}: no answer after {made}: {causes}")

    # ------------------------------------------------------------ one attempt

    def _choose(self) -> _Endpoint:
        """The least busy of those that work; where none does, the one that has rested longest."""
        now = time.monotonic()
        working = [endpoint for endpoint in self._endpoints if endpoint.available(now)]
        if not working:
            return min(self._endpoints, key=lambda endpoint: endpoint.rests_until)
        # Ties are drawn: several worker processes would otherwise all begin with the first.
        return min(working, key=lambda endpoint: (endpoint.outstanding, random.random()))

    async def _attempt(self, endpoint: _Endpoint, body: bytes) -> Any | _Trouble:
        import aiohttp

        endpoint.outstanding += 1
        place = f"reward {self.service.reward}: {shown(endpoint.url)}"
        try:
            session = await self._opened()
            async with session.post(endpoint.url, data=body, headers=self._headers(), allow_redirects=False) as response:
                content = await _read(response)
                text = content.decode("utf-8", errors="replace")
                said = _first_line(self._without_secrets(text))
                answered = f"answered {self._status(response)}{said}"
                if response.status in (TOO_MANY, REQUEST_TIMEOUT) or response.status >= LEAST_SERVER_ERROR:
                    wait = _retry_after(response.headers.get("Retry-After"))
                    return _Trouble(answered, is_answer=response.status in ABOUT_THE_CONTENT, wait_s=wait)
                if not response.ok or response.status >= 300:
                    endpoint.failures = 0
                    raise (Refused if response.status in ABOUT_THE_CONTENT else RewardFailed)(f"{place} {answered}")
        except aiohttp.ConnectionTimeoutError:
            return _Trouble(f"cannot be reached: no connection within {min(CONNECT_S, self.service.timeout_s):g} s", elsewhere=True)
        except TimeoutError:
            return _Trouble(f"gave no answer within {self.service.timeout_s:g} s", elsewhere=True)
        except aiohttp.InvalidURL:
            raise RewardFailed(f"{place} is no URL") from None
        except (aiohttp.ClientError, OSError) as error:
            return _Trouble(f"cannot be reached: {self._without_secrets(_brief(error))}")
        finally:
            endpoint.outstanding -= 1
        try:
            return self._scrubbed(json.loads(text))
        except ValueError as error:
            return _Trouble(f"answered with malformed JSON ({error}){said}", is_answer=True)

    def _encoded(self, payload: Any) -> bytes:
        try:
            return json.dumps(payload).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"reward {self.service.reward}: the request cannot be written as JSON: {error}") from None

    async def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._open = _session(self.service)
            self._session = await anext(self._open)
        return self._session

    # ------------------------------------------------------------ the key

    def _key(self) -> str | None:
        variable = self.service.api_key_env
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key:
            raise RewardFailed(f"reward {self.service.reward}: the environment variable {variable} (api_key_env) is not set")
        if not key.isprintable():
            raise RewardFailed(f"reward {self.service.reward}: the key in {variable} (api_key_env) has characters that no header may hold")
        return key

    def _headers(self) -> dict[str, str]:
        key, header = self._key(), self.service.api_key_header
        secret = {} if key is None else {header: f"Bearer {key}" if header.lower() == "authorization" else key}
        return {"Content-Type": "application/json", **secret}

    def _without_secrets(self, text: str) -> str:
        """Services like to repeat the key that they refuse, as it is, in JSON or in a URL."""
        key = self._key()
        if key is None:
            return text
        if "\\u" in text:  # any letter may be written as its number
            with suppress(ValueError):
                text = json.dumps(json.loads(text), ensure_ascii=False)
        in_json = json.dumps(key)[1:-1]
        for spelling in sorted({key, in_json, in_json.replace("/", "\\/"), quote(key, safe="")}, key=len, reverse=True):
            text = text.replace(spelling, HIDDEN)
        return text

    def _scrubbed(self, answer: Any) -> Any:
        """Whatever escapes the key was written with are gone by now. A key of a few letters is no secret, and in most words."""
        if len(self._key() or "") < SHORTEST_SECRET:
            return answer
        if isinstance(answer, str):
            return self._without_secrets(answer)
        if isinstance(answer, list):
            return [self._scrubbed(one) for one in answer]
        if isinstance(answer, dict):
            return {self._without_secrets(name): self._scrubbed(value) for name, value in answer.items()}
        return answer

    def _status(self, response: aiohttp.ClientResponse) -> str:
        return self._without_secrets(f"{response.status} {response.reason or ''}".strip())


_OF_LOOP: dict[asyncio.AbstractEventLoop, dict[Hashable, Any]] = {}


def of_running_loop(key: Hashable, make: Callable[[], T]) -> T:
    """What belongs to the running event loop under this key, made at the first use. It ends with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _OF_LOOP:
        for other in [one for one in _OF_LOOP if one.is_closed()]:
            del _OF_LOOP[other]
        _OF_LOOP[loop] = {}
    known = _OF_LOOP[loop]
    if key not in known:
        known[key] = make()
    return known[key]


def shared(service: Service) -> HttpClient:
    """The client of the running event loop for this service."""
    return of_running_loop(service, lambda: HttpClient(service))


class AskingReward(RewardType):
    """A type that asks a service."""

    concurrency: PositiveInt = 64
    """Requests under way at the same time, in each worker."""
    timeout_s: PositiveFloat = 20.0
    """Time after which one request counts as failed, less than the reward's own `timeout_s`."""
    retries: NonNegativeInt = 3
    """How often a failed request is tried again, with growing pauses."""
    api_key_env: KeyVariable | None = None
    """Name of the environment variable that holds the key."""
    api_key_header: str = "Authorization"
    """Header that carries the key; with Authorization it is sent as a bearer token."""
    trust_env: bool = False
    """Send requests through the proxy that the environment names."""

    def service(self, reward: str, urls: Sequence[str]) -> Service:
        limits = (self.concurrency, self.timeout_s, self.retries)
        return Service(reward, tuple(urls), self.api_key_env, self.api_key_header, *limits, self.trust_env)

    def warm(self) -> None:
        """Import the HTTP library."""
        warm_http()

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        if "timeout_s" in self.model_fields_set:
            yield from too_slow(place, "timeout_s", self.timeout_s, self.timeout_s, timeout_s)


def several(urls: str | tuple[str, ...]) -> tuple[str, ...]:
    return (urls,) if isinstance(urls, str) else urls


def warm_http() -> None:
    """Import the HTTP library before a time limit runs."""
    import aiohttp  # noqa: F401


async def _session(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """Closed when the event loop ends: an asyncio.Runner finishes what is left of asynchronous generators."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=service.timeout_s, sock_connect=min(CONNECT_S, service.timeout_s))
    connector = aiohttp.TCPConnector(limit=0)
    # No cookies: an answer must not depend on the one before.
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=service.trust_env, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > LARGEST_ANSWER:
            raise OSError(f"its answer has more than {LARGEST_ANSWER >> 20} MB")
    return bytes(content)


def shown(url: str) -> str:
    """Without user, password, query and fragment."""
    with suppress(ValueError):
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return "(a URL that cannot be read)"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].strip()
    return f": {line[:SHOWN_CHARACTERS]}" if line else ""


def _brief(error: BaseException) -> str:
    """aiohttp's own words may hold the URL as it was given; the system's do not."""
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return f"{type(inner).__name__}: {inner}".partition("\n")[0].rstrip(": ")


def _retry_after(header: str | None) -> float | None:
    """Seconds; a date is not worth a parser."""
    try:
        return None if header is None else min(max(float(header), 0.0), LONGEST_BACKOFF_S)
    except ValueError:
        return None


def _backoff(attempt: int) -> float:
    return float(min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * random.uniform(0.5, 1.0))
