"""The HTTP client against a server that fails in every way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support_http import Reply, StubServer, unused_url

from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.http import client as http_client
from roll_lite.rewards.http.client import HttpClient, HttpSettings, ServiceRefused, shown
from roll_lite.rewards.http.remote import RemoteReward

KEY = "sk-very-secret-0123"
CLIENTS: list[HttpClient] = []
"""Until its loop ends, which closes its connections, a client must be referenced."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "BACKOFF_S", 0.02)


def client(*urls: str, **settings: Any) -> HttpClient:
    one = HttpClient("remote", urls, HttpSettings(**settings))
    CLIENTS.append(one)
    return one


async def test_an_answer_and_a_connection_that_lives_on() -> None:
    with StubServer(lambda request, number: Reply({"got": request})) as server:
        http = client(server.url)
        for number in range(5):
            assert await http.post({"n": number}) == ({"got": {"n": number}}, server.url)
    assert server.connections == 1


@pytest.mark.parametrize(
    "first", [Reply(status=429), Reply("out of memory", 500), Reply(status=503), Reply(reset=True), Reply(b"{not json")]
)
async def test_what_passes_is_tried_again(first: Reply) -> None:
    with StubServer(lambda request, number: first if number < 2 else Reply("fine")) as server:
        assert (await client(server.url).post({}))[0] == "fine"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "cause", "kind"),
    [
        (Reply(b"CUDA error\nat line 3", 500), "answered 500 Internal Server Error: CUDA error", ServiceRefused),
        (Reply({"error": "slow down"}, 429), 'answered 429 Too Many Requests: {"error": "slow down"}', RewardFailed),
        (Reply(b"<html>", 200), "answered with malformed JSON (Expecting value: line 1 column 1 (char 0)): <html>", ServiceRefused),
        (Reply(reset=True), "cannot be reached: ", RewardFailed),
        (Reply(b"", 200, {"Content-Length": "10"}), "cannot be reached: ", RewardFailed),
    ],
)
async def test_what_does_not_pass_is_a_failure_with_its_cause(reply: Reply, cause: str, kind: type[RewardFailed]) -> None:
    with StubServer(lambda request, number: reply) as server:
        with pytest.raises(RewardFailed) as caught:
            await client(server.url, retries=1, timeout_s=2.0).post({})
    # A body that ends early keeps its connection open: it shows as a time-out.
    assert caught.value.cause.startswith("reward remote: no answer after ")
    assert f"{server.url} " in caught.value.cause
    if reply.headers:
        assert "no answer within 2 s" in caught.value.cause
    else:
        assert f"after 2 attempts: {server.url} {cause}" in caught.value.cause
        assert len(server.requests) == 2
        assert type(caught.value) is kind


@pytest.mark.parametrize(("status", "reason"), [(400, "Bad Request"), (401, "Unauthorized"), (404, "Not Found"), (302, "Found")])
async def test_a_refusal_is_final(status: int, reason: str) -> None:
    with StubServer(lambda request, number: Reply(b"no such thing", status, {"Location": "http://elsewhere/"})) as server:
        with pytest.raises(RewardFailed, match=f"^reward remote: {server.url} answered {status} {reason}: no such thing$") as caught:
            await client(server.url).post({})
    assert len(server.requests) == 1
    assert isinstance(caught.value, ServiceRefused) is (status == 400)


async def test_down() -> None:
    url = unused_url()
    with pytest.raises(RewardFailed, match=f"no answer after 3 attempts: {url} cannot be reached: .*[Cc]onnect"):
        await client(url, retries=2).post({})


async def test_pauses_are_limited_after_any_number_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LONGEST_BACKOFF_S", 0.0)
    with pytest.raises(RewardFailed, match="no answer after 1101 attempts"):
        await client(unused_url(), retries=1100).post({})


async def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(RewardFailed, match="http://no-such-host.invalid/v1 cannot be reached: "):
        await client("http://no-such-host.invalid/v1", retries=0).post({})


async def test_slow_is_not_asked_twice_for_the_same() -> None:
    with StubServer(lambda request, number: Reply("late", delay_s=1.0)) as server:
        with pytest.raises(RewardFailed, match=f"no answer after 1 attempt: {server.url} gave no answer within 0.2 s"):
            await client(server.url, timeout_s=0.2).post({})


async def test_retry_after_is_honoured() -> None:
    with StubServer(lambda request, number: Reply("fine") if number else Reply(status=429, headers={"Retry-After": "0.3"})) as server:
        started = time.monotonic()
        await client(server.url).post({})
        assert time.monotonic() - started >= 0.3


async def test_one_of_two_urls_down_costs_nobody_a_sample_and_is_hardly_asked() -> None:
    with StubServer(lambda r, n: Reply(status=503)) as down, StubServer(lambda r, n: Reply(n)) as server:
        http = client(down.url, server.url, retries=2)
        answers = await asyncio.gather(*(http.post({}) for _ in range(50)))
        assert {url for _, url in answers} == {server.url}
        failures = len(down.requests)
        for _ in range(20):
            await http.post({})
        assert len(down.requests) <= failures + 2


async def test_a_url_that_comes_back_is_used_again() -> None:
    broken = True
    with StubServer(lambda request, number: Reply(status=503) if broken else Reply("a")) as a, StubServer(lambda r, n: Reply("b")) as b:
        http = client(a.url, b.url)
        for _ in range(4):
            assert (await http.post({}))[0] == "b"
        broken = False
        await asyncio.sleep(0.5)
        answers = [answer for answer, _ in await asyncio.gather(*(http.post({}) for _ in range(20)))]
        answers += [answer for answer, _ in await asyncio.gather(*(http.post({}) for _ in range(20)))]
    assert {"a", "b"} == set(answers)


async def test_requests_go_where_fewest_are_under_way() -> None:
    with StubServer(lambda r, n: Reply("fast", delay_s=0.01)) as fast, StubServer(lambda r, n: Reply("slow", delay_s=0.5)) as slow:
        http = client(fast.url, slow.url, concurrency=4)
        await asyncio.gather(*(http.post({}) for _ in range(60)))
    assert len(slow.requests) <= 10 < 50 <= len(fast.requests)


async def test_concurrency_is_limited() -> None:
    with StubServer(lambda r, n: Reply("ok", delay_s=0.05)) as server:
        http = client(server.url, concurrency=3)
        await asyncio.gather(*(http.post({}) for _ in range(12)))
    assert server.most_at_once == 3


async def test_proxies_of_the_environment_do_not_redirect_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", unused_url())
    monkeypatch.setenv("no_proxy", "")
    with StubServer(lambda r, n: Reply("direct")) as server:
        assert (await client(server.url).post({}))[0] == "direct"
        with pytest.raises(RewardFailed):
            await client(server.url, trust_env=True, retries=0).post({})


@pytest.mark.parametrize(("header", "sent"), [("Authorization", f"Bearer {KEY}"), ("X-Api-Key", KEY)])
async def test_the_key_is_sent_and_repeated_nowhere(monkeypatch: pytest.MonkeyPatch, header: str, sent: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    wrong = Reply({"error": f"Incorrect API key provided: {KEY}"}, 401)
    with StubServer(lambda r, n: wrong if n else Reply({"echo": KEY})) as server:
        http = client(server.url, api_key_env="JUDGE_KEY", api_key_header=header)
        assert (await http.post({}))[0] == {"echo": "***"}
        with pytest.raises(RewardFailed, match=r"Incorrect API key provided: \*\*\*") as caught:
            await http.post({})
    assert server.headers[0][header] == sent
    assert KEY not in repr(caught.value) + repr(http) + str(caught.value.__cause__) + str(caught.value.__context__)


@pytest.mark.parametrize("spelling", ["plain", "slashes", "unicode", "url"])
@pytest.mark.parametrize("status", [200, 401, 500])
async def test_a_key_that_comes_back_in_another_spelling(monkeypatch: pytest.MonkeyPatch, spelling: str, status: int) -> None:
    key = "sk/very+secret/0123"
    escaped = {
        "plain": key,
        "slashes": key.replace("/", "\\/"),
        "unicode": "".join(f"\\u{ord(letter):04x}" for letter in key),
        "url": "sk%2Fvery%2Bsecret%2F0123",
    }[spelling]
    monkeypatch.setenv("JUDGE_KEY", key)
    with StubServer(lambda r, n: Reply(f'{{"error": ["no {escaped}"]}}'.encode(), status)) as server:
        http = client(server.url, api_key_env="JUDGE_KEY", retries=0)
        if status == 200:
            assert (await http.post({}))[0] == {"error": ["no ***"]}
            return
        with pytest.raises(RewardFailed) as caught:
            await http.post({})
    assert "answered" in caught.value.cause and '{"error": ["no ***"]}' in caught.value.cause


async def test_a_short_key_breaks_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a test setup it may be a single letter, which stands in every number and word."""
    monkeypatch.setenv("JUDGE_KEY", "e1")
    with StubServer(lambda r, n: Reply(b'{"scores": [1e1, 0.5], "verdict": "e1: yes"}')) as server:
        answer, _ = await client(server.url, api_key_env="JUDGE_KEY").post({})
    assert answer == {"scores": [10.0, 0.5], "verdict": "e1: yes"}


async def test_a_key_in_the_words_of_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 403 no {KEY} here\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RewardFailed, match=r"answered 403 no \*\*\* here"):
            await client(f"http://127.0.0.1:{port}", api_key_env="JUDGE_KEY").post({})


async def test_a_key_that_no_header_can_hold_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-first\nsecond")
    with pytest.raises(RewardFailed, match="the environment variable JUDGE_KEY .* has characters") as caught:
        await client(unused_url(), api_key_env="JUDGE_KEY").post({})
    assert "sk-first" not in caught.value.cause


async def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    http = client(unused_url(), api_key_env="JUDGE_KEY")
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RewardFailed, match=r"the environment variable JUDGE_KEY \(api_key_env\) is not set"):
        await http.post({})


async def test_credentials_in_a_url_are_not_shown() -> None:
    host = unused_url().removeprefix("http://")
    with pytest.raises(RewardFailed) as caught:
        await client(f"http://me:{KEY}@{host}/get?key={KEY}", retries=0).post({})
    assert KEY not in caught.value.cause and f"http://{host}/get cannot be reached" in caught.value.cause
    assert shown(f"http://me:{KEY}@host:1/v1?k#f") == "http://host:1/v1"


async def test_a_request_that_is_no_json() -> None:
    with pytest.raises(RewardFailed, match="the request cannot be written as JSON: Object of type set"):
        await client(unused_url()).post({"labels": {1}})


def test_requests_share_a_connection() -> None:
    with StubServer(lambda r, n: Reply("ok")) as server, asyncio.Runner() as runner:
        http = HttpClient("remote", [server.url], RemoteReward(url=server.url))
        for _ in range(2):
            runner.run(http.post({}))
        assert server.connections == 1
