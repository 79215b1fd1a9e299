"""Reward `remote` against a stub, and against the example server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support_http import Reply, StubServer, unused_url

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.http import client as http_client
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.running.batch_scorer import BatchScorer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "BACKOFF_S", 0.01)


def item(response: str = "4", answer: Any = "4", **columns: Any) -> RewardInput:
    return RewardInput("toy", "2+2=", response, answer, columns, "stop")


def score(items: list[RewardInput], timeout_s: float = 60, **args: Any) -> list[Score | str]:
    """Outcomes as a reward worker has them."""
    scoring, _ = BatchScorer.of(RewardConfig(name="remote", args=args, timeout_s=timeout_s), "domains.toy.reward")
    results: dict[int, Any] = {}
    scored = scoring(dict(enumerate(items)), 1.0)
    while len(results) < len(items):
        results |= scored.results
        scored = scoring({}, 1.0)
    return [results[number] for number in range(len(items))]


def lengths(request: Any, number: int) -> Reply:
    return Reply({"rewards": [len(query) - len(prompt) for query, prompt in zip(request["query"], request["prompts"], strict=True)]})


def test_samples_travel_together_and_scores_find_their_way_back() -> None:
    with StubServer(lengths) as server:
        scores = score([item("x" * n) for n in range(10)], url=server.url, batch_size=4)
    assert [one.value for one in scores if isinstance(one, Score)] == list(range(10))
    assert sorted(len(request["query"]) for request in server.requests) == [2, 4, 4]
    first = min(server.requests, key=lambda request: len(request["query"][0]))
    assert first.keys() == {"query", "prompts", "labels"}
    assert (first["query"][1], first["prompts"][1], first["labels"][1]) == ("2+2=x", "2+2=", "4")


def test_what_else_the_service_tells_is_kept_with_the_sample() -> None:
    answer = {"rewards": [-1.5, 2], "scores": [0.0, 1], "extra_logs": {"words": [3, 4], "model": "m", "odd": [1], "why": ["a", "b"]}}
    with StubServer(lambda request, number: Reply(answer)) as server:
        bad, good = score([item(), item()], url=server.url, batch_size=2)
    assert bad == Score(-1.5, False, {"score": 0.0, "words": 3.0, "model": "m", "why": "a"})
    assert good == Score(2.0, True, {"score": 1.0, "words": 4.0, "model": "m", "why": "b"})


def test_columns_are_sent_where_asked_for() -> None:
    with StubServer(lengths) as server:
        score([item(level=3), item()], url=server.url, columns=["level"], batch_size=2)
    assert server.requests[0]["columns"] == {"level": [3, None]}


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({"rewards": []}, "0 rewards for 1 samples"),
        ({"rewards": [1, 2, 3]}, "3 rewards for 1 samples"),
        ({"rewards": 1.0}, "rewards: Input should be a valid list, got 1.0"),
        ({"reward": [1, 2]}, "rewards: Field required, got {'reward': [1, 2]}"),
        ([1, 2], "the answer: Input should be a valid dictionary or instance of "),
        ({"rewards": [1], "scores": []}, "0 scores for 1 samples"),
        ({"rewards": [1], "scores": ["1"]}, "scores.0: Input should be a valid number, got '1'"),
        ({"rewards": [1], "extra_logs": [1]}, "extra_logs: Input should be a valid dictionary, got [1]"),
    ],
)
def test_answers_that_do_not_fit(answer: Any, cause: str) -> None:
    with StubServer(lambda request, number: Reply(answer)) as server:
        results = score([item(), item()], url=server.url, batch_size=2)
    assert len(server.requests) == 7, "together and in halves; then each alone, with a harmless response as well"
    for result in results:
        assert isinstance(result, str) and result.startswith(f"reward remote: {server.url}: ") and cause in result


def test_a_reward_that_is_no_number_costs_its_own_sample_only() -> None:
    def answer(request: Any, number: int) -> Reply:
        """Each response, as it stands; NaN for a harmless one."""
        given = [query.removeprefix("2+2=") for query in request["query"]]
        return Reply(f'{{"rewards": [{", ".join("NaN" if " " in one else one for one in given)}]}}'.encode())

    with StubServer(answer) as server:
        results = score([item(one) for one in ("1", "NaN", "null", '"1"', "[1]", "Infinity", "0", "true")], url=server.url)
    assert [type(result) for result in results] == [Score, str, str, str, str, str, Score, Score]
    assert results[1] == f"reward remote: {server.url}: rewards.0: Input should be a finite number, got nan"


@pytest.mark.parametrize("refused", [0.0, -20.0])
def test_a_sample_that_the_service_refuses_does_not_take_its_batch_along(refused: float) -> None:
    def picky(request: Any, number: int) -> Reply:
        return Reply({"error": "too long"}, 422) if any("poison" in query for query in request["query"]) else lengths(request, number)

    with StubServer(picky) as server:
        results = score([item("poison" if n == 5 else "x" * n) for n in range(16)], url=server.url, batch_size=16, refused=refused)
    told = f'reward remote: {server.url} answered 422 Unprocessable Entity: {{"error": "too long"}}'
    assert results[5] == Score(refused, False, {"verdict": told})
    assert [one.value for one in results if isinstance(one, Score)] == [refused if n == 5 else n for n in range(16)]
    assert len(server.requests) == 12, "9 to find it, then alone, with a harmless response, and once more"


def test_down_fails_the_batch_once() -> None:
    results = score([item()] * 3, url=unused_url(), retries=1)
    assert all(isinstance(result, str) and "after 2 attempts" in result for result in results)
    with StubServer(lambda request, number: Reply("no", 503)) as server:
        results = score([item()] * 6, url=server.url, retries=1, batch_size=3)
    assert [len(request["query"]) for request in server.requests] == [3] * 4
    assert all(isinstance(result, str) and "answered 503" in result for result in results)


def test_each_request_has_its_own_time_limit() -> None:
    """A slow answer costs its own samples only; none has to be asked for again alone."""

    def slow(request: Any, number: int) -> Reply:
        time.sleep(5.0 if "xxxx" in request["query"][0] else 0.0)
        return lengths(request, number)

    reward = RewardConfig(name="remote", args={"batch_size": 1, "retries": 0}, timeout_s=2)
    with StubServer(slow) as server:
        reward = reward.model_copy(update={"args": {**reward.args, "url": server.url}})
        scoring, _ = BatchScorer.of(reward, "domains.toy.reward")
        results, suspects = dict[int, Any](), set[int]()
        scored = scoring({n: item("x" * n) for n in range(1, 5)}, 1.0)
        while len(results) < 4 and not suspects:
            results, suspects = results | scored.results, suspects | scored.suspects
            scored = scoring({}, 1.0)
    assert suspects == set() and [results[n].value for n in (1, 2, 3)] == [1, 2, 3] and "time" in results[4]


def test_waiting_for_a_free_request_is_not_part_of_a_samples_time() -> None:
    def slow(request: Any, number: int) -> Reply:
        time.sleep(0.7)
        return lengths(request, number)

    with StubServer(slow) as server:
        assert [one.value for one in score([item()] * 5, timeout_s=2.5, url=server.url, batch_size=1, concurrency=1)] == [1.0] * 5  # type: ignore[union-attr]


def test_several_urls_one_of_them_down() -> None:
    with StubServer(lengths) as a, StubServer(lengths) as b:
        results = score([item("x" * n) for n in range(40)], url=[unused_url(), a.url, b.url], batch_size=2)
    assert [result.value for result in results if isinstance(result, Score)] == list(range(40))
    assert len(a.requests) > 3 and len(b.requests) > 3


def test_an_answer_that_is_no_json_is_a_failure() -> None:
    (result,) = score([item(answer={1})], url=unused_url())
    assert isinstance(result, str) and "cannot be written as JSON" in result


@pytest.mark.parametrize("args", [{}, {"url": "http://h", "batch_size": 0}, {"url": "http://h", "api_key_env": "NO_SUCH_VARIABLE"}])
def test_wrong_arguments_are_told_at_the_start(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^domains\.toy\.reward\.args"):
        build_reward(RewardConfig(name="remote", args=args), "domains.toy.reward")


@contextmanager
def example_server(**environment: str) -> Iterator[str]:
    command = [sys.executable, "examples/reward_server.py", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_the_example_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "k-123")
    with example_server(REWARD_SERVER_KEY="k-123") as url:
        right, wrong = score([item("4"), item("abc")], url=url, api_key_env="REWARD_KEY")
        refused, _ = score([item(), item()], url=url)
    assert right == Score(1.0, True, {"score": 1.0, "characters": 1.0})
    assert wrong == Score(0.0, False, {"score": 0.0, "characters": 3.0})
    assert isinstance(refused, str) and "401 Unauthorized" in refused and "wrong or missing key" in refused
