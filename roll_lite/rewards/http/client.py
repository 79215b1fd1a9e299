from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt

from roll_lite.config.problems import HIDDEN
from roll_lite.config.schema.base import Section
from roll_lite.rewards.base import ResponseSuspected, RewardFailed, RewardType

BACKOFF_S, LONGEST_BACKOFF_S, CONNECT_S = 0.25, 8.0, 5.0
SHOWN_CHARACTERS, SHORTEST_SECRET = 200, 8
PASSING = (408, 429, *range(500, 600))
ABOUT_THE_CONTENT = (400, 403, 413, 422, 500)
"""Status codes that the request's content may cause (too long, malformed, moderated)."""


def _is_set(variable: str) -> str:
    """Return `variable` if an environment variable of this name is set, else ValueError. Messages omit the name: a user may have entered
    the key itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ValueError("is no name of an environment variable; the key itself must not stand here")
    if not os.environ.get(variable, "").strip():
        raise ValueError("there is no environment variable of this name; set it to the key, then start")
    return variable


def _are_urls(given: str | tuple[str, ...]) -> str | tuple[str, ...]:
    for url in several(given):
        if not re.match(r"https?://[^/?#\s]", url) or not urlsplit(url).hostname:
            raise ValueError("is no URL of the form http://host:port/path or https://...")
    if not given:
        raise ValueError("needs at least one address")
    return given


KeyVariable = Annotated[str, AfterValidator(_is_set)]
Addresses = Annotated[str | tuple[str, ...], AfterValidator(_are_urls)]


class HttpSettings(Section):
    concurrency: PositiveInt = 64
    """Concurrent requests per worker."""
    timeout_s: PositiveFloat = 20.0
    """Time limit of one request; must be less than the reward's `timeout_s`."""
    retries: NonNegativeInt = 3
    """Maximum retries of a failed request, with growing pauses."""
    api_key_env: KeyVariable | None = None
    """Name of the environment variable that holds the key."""
    api_key_header: str = "Authorization"
    """Header that carries the key; with Authorization it is sent as a bearer token."""
    trust_env: bool = False
    """Use the proxy that environment variables name."""


class AskingReward(RewardType, HttpSettings):
    unshown = ("url", "api_key_env", "extra_body")

    def warm(self) -> None:
        import httpx2  # noqa: F401

    def concurrent_calls(self) -> int:
        return self.concurrency

    def longest_s(self) -> dict[str, float]:
        return {"timeout_s": self.timeout_s} if "timeout_s" in self.model_fields_set else {}


class ServiceRefused(ResponseSuspected):
    """Refusal of a request by the service, perhaps because of the model's response."""


@dataclass(eq=False)
class _Failed(Exception):
    """Failed request.

    `is_refusal`: the response may be to blame. `is_slow`: retry only at other URLs. `wait_s`: pause that the service asks for.
    """

    cause: str
    is_refusal: bool = False
    is_slow: bool = False
    wait_s: float | None = None


@dataclass
class _Url:
    url: str
    requests: int = 0
    failures: int = 0
    """Consecutive failures. A failed URL gets no request until `rests_until`, then one at a time."""
    rests_until: float = 0.0

    def is_available(self) -> bool:
        return self.failures == 0 or (self.requests == 0 and monotonic() >= self.rests_until)

    def rank(self) -> tuple[float, ...]:
        """Sort key: available URLs first, then fewest requests; ties at random, so that workers begin with different URLs."""
        return (0.0 if self.is_available() else self.rests_until, self.requests, random.random())


class HttpClient:
    def __init__(self, reward: str, urls: Sequence[str], settings: HttpSettings) -> None:
        import httpx2

        self._reward, self._settings = f"reward {reward}", settings
        self._urls = [_Url(url) for url in urls]
        self._limit = asyncio.Semaphore(settings.concurrency)
        timeout = httpx2.Timeout(None, connect=min(CONNECT_S, settings.timeout_s))
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=settings.trust_env)

    async def post(self, payload: Any, retries: int | None = None) -> tuple[Any, str]:
        """Return the answer's JSON and the URL, without secrets. ServiceRefused if the service rejects `payload`, RewardFailed if all
        attempts fail."""
        try:
            body = json.dumps(payload)
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"{self._reward}: the request cannot be written as JSON: {error}") from None
        attempts, causes = 1 + (self._settings.retries if retries is None else retries), dict[str, str]()
        async with self._limit:
            for attempt in range(attempts):
                url = min(self._urls, key=_Url.rank)
                url.requests += 1
                try:
                    return await self._attempt(url, body), shown(url.url)
                except _Failed as one:
                    failed = one
                finally:
                    url.requests -= 1
                url.failures += 1
                url.rests_until = monotonic() + (_backoff(url.failures) if failed.wait_s is None else failed.wait_s)
                causes[shown(url.url)] = failed.cause
                if not any(url.is_available() for url in self._urls):
                    if failed.is_slow or attempt == attempts - 1:
                        break
                    await asyncio.sleep(max(failed.wait_s or 0.0, _backoff(attempt) * random.uniform(0.5, 1.0)))
        said = f"no answer after {attempt + 1} attempt{'s' if attempt else ''}: {'; '.join(map(' '.join, causes.items()))}"
        raise (ServiceRefused if failed.is_refusal else RewardFailed)(f"{self._reward}: {said}")

    async def _attempt(self, url: _Url, body: str) -> Any:
        import httpx2

        key, header, seconds = self._key(), self._settings.api_key_header, self._settings.timeout_s
        authorization = {} if key is None else {header: f"Bearer {key}" if header.lower() == "authorization" else key}
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.post(url.url, content=body, headers={"Content-Type": "application/json", **authorization})
        except httpx2.ConnectTimeout:
            raise _Failed(f"cannot be reached: no connection within {min(CONNECT_S, seconds):g} s", is_slow=True) from None
        except (TimeoutError, httpx2.TimeoutException):
            raise _Failed(f"gave no answer within {seconds:g} s", is_slow=True) from None
        except (httpx2.HTTPError, OSError) as error:
            innermost: BaseException = error  # outer messages may contain the URL
            while (cause := innermost.__cause__ or innermost.__context__) is not None:
                innermost = cause
            said = innermost.strerror if isinstance(innermost, OSError) else None
            said = said or f"{type(innermost).__name__}: {innermost}".rstrip(": ")
            raise _Failed(f"cannot be reached: {_without(key, said)}") from None
        text, is_refusal = _without(key, response.text), response.status_code in ABOUT_THE_CONTENT
        said = f": {text.strip().splitlines()[0][:SHOWN_CHARACTERS]}" if text.strip() else ""
        answered = f"answered {response.status_code} {_without(key, response.reason_phrase)}".strip() + said
        if response.status_code in PASSING:
            asked = re.fullmatch(r"\d+(?:\.\d+)?", response.headers.get("Retry-After", ""))
            raise _Failed(answered, is_refusal, wait_s=min(float(asked[0]), LONGEST_BACKOFF_S) if asked else None)
        url.failures = 0
        if not response.is_success:
            raise (ServiceRefused if is_refusal else RewardFailed)(f"{self._reward}: {shown(url.url)} {answered}")
        try:  # a key of a few letters is no secret, and hiding it would break most words
            return json.loads(text if key and len(key) >= SHORTEST_SECRET else response.text)
        except (ValueError, RecursionError) as error:
            raise _Failed(f"answered with malformed JSON ({error}){said}", is_refusal=True) from None

    def _key(self) -> str | None:
        if (variable := self._settings.api_key_env) is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key or not key.isprintable():
            trouble = "has characters that no header may hold" if key else "is not set"
            raise RewardFailed(f"{self._reward}: the environment variable {variable} (api_key_env) {trouble}")
        return key


def _backoff(failures: int) -> float:
    return float(min(BACKOFF_S * 2 ** min(failures, 10), LONGEST_BACKOFF_S))


def _without(key: str | None, text: str) -> str:
    """Hide the key in a text: services may echo it."""
    if key is None:
        return text
    with suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    for spelling in sorted({key, json.dumps(key)[1:-1], quote(key, safe="")}, key=len, reverse=True):
        text = text.replace(spelling, HIDDEN)
    return text


def several(urls: str | tuple[str, ...]) -> tuple[str, ...]:
    return (urls,) if isinstance(urls, str) else urls


def shown(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
