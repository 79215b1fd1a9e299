"""The rule for all rewards: a response decides its score, never whether its sample can be scored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support_http import Reply, StubServer, unused_url
from support_models import make_tiny_reward_model
from workers.test_reward_model_pool import FakeRank, ranks

from roll_lite.config.schema.domains import FormatConfig, RewardConfig
from roll_lite.config.schema.models import RewardModelConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import HARMLESS_RESPONSE, RewardFailed
from roll_lite.rewards.http import client as http_client
from roll_lite.rewards.http import judge as judge_module
from roll_lite.rewards.registry import REWARDS
from roll_lite.rewards.running.batch_scorer import BatchScorer
from roll_lite.rewards.text import format as format_module
from roll_lite.workers.reward_model import RewardModelSpec, TextTokens
from roll_lite.workers.reward_model_pool import RewardModelClient, RewardModelPool

CITIES = ["Paris", "Rome", "Berlin", "Oslo"]
MOST_CHARACTERS = 500
"""What the stub services, the reward model and its tokens take."""

NASTY = {
    "empty": "",
    "blank": " \n\t\u200b\u3000",
    "a megabyte of words": "word " * 200_000,
    "a megabyte without a blank": "x" * 1_000_000,
    "a megabyte of lines": "\n" * 1_000_000,
    "an option 1,000 times": "Paris " * 1000,
    "an option 1,000 times, in a line": "Paris" * 1000,
    "or 1,000 times": "Paris or " * 1000,
    "statements 1,000 times": "The answer is (A). No, the answer is B. " * 1000,
    "nested boxes": "\\boxed{" * 2000 + "1" + "}" * 2000,
    "nested fractions": "$" + "\\frac{1}{" * 500 + "2" + "}" * 500 + "$",
    "nested parentheses": "\\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    "nested JSON": "[" * 100_000,
    "nested code": "```python\ndef f(x):\n    return " + "(" * 5000 + "x" + ")" * 5000 + "\n```",
    "thoughts in thoughts": "<think>" * 5000 + "</think>" * 4999,
    "tags": "<answer>" * 20_000,
    "fences": "```" * 50_000,
    "a huge number": "\\boxed{" + "9" * 20_000 + "}",
    "a tower of powers": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "all of the plane": "".join(map(chr, range(1, 0xD800))),
    "surrogates": "\ud800\udfff\udcff" * 1000,
    "null characters": "\0" * 1000 + "\\boxed{\0}",
    "bytes": bytes(range(256)).decode("latin-1") * 20,
    "combining marks": "a" + "\u0301" * 100_000,
    "right to left": "\u202e\u2066" * 1000 + "\u0661\u0662",
    "placeholders": "{answer} {prompt} {0} %s {{" * 100,
}

ANSWERS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "math": ({"cpu_limit_s": 1.0}, "42", {}),
    "exact": ({"ignore_punctuation": True, "collapse_spaces": True, "ignore_case": True, "contains": True}, "zebra", {}),
    "code": ({}, ["assert f(3) == 4"], {}),
    "choice": ({}, "Berlin", {"options": CITIES}),
    "instruction": (
        {},
        None,
        {
            "instruction_id_list": [
                "keywords:existence",
                "detectable_format:json_format",
                "language:response_language",
                "format:title_case",
            ],
            "kwargs": [{"keywords": ["zebra"]}, {}, {"language": "en"}, {}],
        },
    ),
    "length": ({"limit": 10}, None, {}),
    "repetition": ({"unit": "characters"}, None, {}),
    "format": ({"preset": "think_answer"}, None, {}),
    "judge": ({"model": "m"}, "42", {}),
    "remote": ({"retries": 0}, "42", {}),
}
"""Arguments, reference answer and columns of each type that runs in a reward worker."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "BACKOFF_S", 0.001)


def verdict(text: str | None, finish_reason: str = "stop") -> Reply:
    return Reply({"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]})


def judge_with_a_short_context(request: Any, number: int) -> Reply:
    is_long = len(request["messages"][0]["content"]) > MOST_CHARACTERS
    return Reply({"error": "maximum context length"}, 400) if is_long else verdict("Verdict: no")


def service_that_raises(request: Any, number: int) -> Reply:
    return (
        Reply("stack trace", 500)
        if max(map(len, request["query"])) > MOST_CHARACTERS
        else Reply({"rewards": [0.0] * len(request["query"])})
    )


@contextmanager
def scorer(name: str, **more: Any) -> Iterator[tuple[BatchScorer, Any, dict[str, Any]]]:
    args, answer, columns = ANSWERS[name]
    with StubServer(judge_with_a_short_context if name == "judge" else service_that_raises) as server:
        args = {**args, "url": server.url} if name in ("judge", "remote") else args
        config = RewardConfig(name=name, args={**args, **more}, timeout_s=120, format=FormatConfig(pattern=r"^\d+$"))
        yield BatchScorer.of(config, "reward")[0], answer, columns


def sample(response: str, answer: Any = None, columns: Any = None) -> RewardInput:
    return RewardInput("toy", "prompt", response, answer, columns or {}, "stop", "6 x 7?")


def test_every_type_is_held_to_the_rule() -> None:
    reads_no_response = "environment"
    assert {*ANSWERS, "model", reads_no_response} == set(REWARDS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_response_is_it_has_a_score(name: str) -> None:
    with scorer(name) as (scoring, answer, columns):
        for kind, response in NASTY.items():
            outcome, _ = scoring.one(sample(response, answer, columns))
            assert isinstance(outcome, Score), f"{kind}: {outcome:.300}"
            if name not in ("length", "repetition"):
                assert (outcome.value, outcome.is_correct) == (0.0, False), kind


@pytest.mark.nightly
async def test_whatever_a_response_is_a_reward_model_has_a_score_for_it(tmp_path: Path) -> None:
    config = RewardModelConfig(path=make_tiny_reward_model(tmp_path / "model"), max_length=MOST_CHARACTERS)
    tokens = TextTokens(RewardModelSpec("toy", config, 0, False))

    class Rank(FakeRank):
        async def _score(self, texts: Any) -> list[float | str] | None:
            found = [tokens.of(text) for text in texts]
            return [ids if isinstance(ids, str) else float(len(ids)) for ids in found]

    client = RewardModelPool("toy", [Rank(ranks(1)[0].own)], config)
    with closing(client):
        pool = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy", "template": "{question}{response}"}), client)
        for kind, response in NASTY.items():
            assert isinstance(await pool.score(sample(response)), Score), kind
        long = await pool.score(sample("word " * 1000))
        assert long.value == 0.0 and "max_length" in str(long.details["verdict"])
        with pytest.raises(RewardFailed, match="reads at most 500"):  # a question that is too long is no response's fault
            await pool.score(RewardInput("toy", "", "2", "2", {}, "stop", "word " * 1000))
        bare = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy", "template": "{response}"}), client)
        assert (await bare.score(sample(""))).value == 0.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "reply",
    [
        verdict("I cannot help with that."),
        verdict(None, "content_filter"),
        verdict("Verdict: yes", "length"),
        Reply({"error": "maximum context length"}, 400),
        Reply({"error": "moderated"}, 403),
        Reply({"error": "too large"}, 413),
        Reply({"error": "forbidden content"}, 422),
        Reply({"error": "forbidden content"}),
        Reply({"choices": []}),
        verdict(["parts"]),  # type: ignore[arg-type]
    ],
)
def test_a_judge_that_fails_on_a_response_gives_it_the_lowest_score(reply: Reply) -> None:
    def answer(request: Any, number: int) -> Reply:
        return reply if "attack" in request["messages"][0]["content"] else verdict("Verdict: no")

    for choices, lowest in ((None, 0.0), ({"yes": 1, "no": -2}, -2.0), ({"yes": 1, "no": 0.5}, 0.0)):
        with StubServer(answer) as server:
            config = RewardConfig(name="judge", args={"url": server.url, "model": "m", "choices": choices}, timeout_s=60)
            score, _ = BatchScorer.of(config, "reward")[0].one(sample("attack", "42"))
            assert isinstance(score, Score) and (score.value, score.correct) == (lowest, False)
            assert HARMLESS_RESPONSE in server.requests[-2]["messages"][0]["content"] or len(server.requests) > 3

    with StubServer(lambda request, number: reply) as server:  # a judge that fails on every response is at fault itself
        config = RewardConfig(name="judge", args={"url": server.url, "model": "m"}, timeout_s=60)
        assert isinstance(BatchScorer.of(config, "reward")[0].one(sample("attack", "42"))[0], str)


@pytest.mark.parametrize("odd", [{"error": "forbidden content"}, "no", None])
def test_a_remote_service_that_answers_a_response_oddly_gives_it_0_and_others_theirs(odd: Any) -> None:
    def answer(request: Any, number: int) -> Reply:
        return Reply(odd if "attack" in "".join(request["query"]) else {"rewards": [0.5] * len(request["query"])})

    with StubServer(answer) as server:
        config = RewardConfig(name="remote", args={"url": server.url}, timeout_s=60)
        scoring, _ = BatchScorer.of(config, "reward")
        results: dict[int, Any] = {}
        scored = scoring({n: sample("attack" if n == 2 else "4") for n in range(4)}, 1.0)
        while len(results) < 4:
            results |= scored.results
            scored = scoring({}, 1.0)
    assert [results[n].value for n in range(4)] == [0.5, 0.5, 0.0, 0.5]


async def test_a_response_for_which_a_reward_model_has_no_number_scores_0(tmp_path: Path) -> None:
    class Rank(FakeRank):
        async def _score(self, texts: Any) -> list[float | str] | None:
            return [math.nan if "attack" in text or "broken" in text else 1.0 for text in texts]

    config = RewardModelConfig(path=tmp_path)
    client = RewardModelPool("toy", [Rank(ranks(1)[0].own)], config)
    with closing(client):
        pool = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy", "template": "{question}{response}"}), client)
        assert (await pool.score(sample("attack"))).value == 0.0
        with pytest.raises(RewardFailed, match="not finite"):  # a model that has none for this question at all
            await pool.score(RewardInput("toy", "", "2", "2", {}, "stop", "broken"))


@pytest.mark.parametrize("status", [401, 403, 404, 429, 502, 503])
def test_a_service_that_fails_is_never_a_score(status: int) -> None:
    """Also if it answers again by the time the harmless response is scored. 403 may be about the content: then all are refused."""
    for name, content in (("judge", verdict("Verdict: no").content), ("remote", {"rewards": [0.0]})):
        with StubServer(lambda request, number: Reply("no", status) if number == 0 or status == 403 else Reply(content)) as server:  # noqa: B023
            args = {"url": server.url, "retries": 0, **({"model": "m"} if name == "judge" else {})}
            outcome, _ = BatchScorer.of(RewardConfig(name=name, args=args, timeout_s=60), "reward")[0].one(sample("4", "42"))
            assert isinstance(outcome, str) and str(status) in outcome


@pytest.mark.parametrize("first", [Reply("out of memory", 500), Reply("moderated", 403)])
def test_a_service_that_recovers_in_between_gives_the_score(first: Reply) -> None:
    def answer(request: Any, number: int) -> Reply:
        return first if number == 0 else Reply({"rewards": [0.75]})

    with StubServer(answer) as server:
        config = RewardConfig(name="remote", args={"url": server.url, "retries": 0}, timeout_s=60)
        outcome, _ = BatchScorer.of(config, "reward")[0].one(sample("4"))
    assert isinstance(outcome, Score) and outcome.value == 0.75


def test_a_service_that_is_down_is_a_failure() -> None:
    for name in ("judge", "remote"):
        args = {"url": unused_url(), "retries": 0, **({"model": "m"} if name == "judge" else {})}
        assert isinstance(BatchScorer.of(RewardConfig(name=name, args=args), "reward")[0].one(sample("4", "42"))[0], str)


def test_a_pattern_that_runs_out_of_time_on_a_response_is_not_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "FORMAT_SECONDS", 0.2)
    runaway, response = r"^(a+)+$", "a" * 60 + "b"
    scoring, _ = BatchScorer.of(RewardConfig(name="format", args={"pattern": runaway}), "reward")
    assert scoring.one(sample(response))[0] == Score(0.0, False, {"verdict": "the pattern ran out of time"})
    assert scoring.one(sample("aaa"))[0] == Score(1.0, True)
    scoring, _ = BatchScorer.of(RewardConfig(name="exact", format=FormatConfig(pattern=runaway)), "reward")
    outcome, _ = scoring.one(sample(response, response))
    assert isinstance(outcome, Score) and (outcome.value, outcome.format_ok) == (1.0, False)


def test_a_pattern_that_runs_out_of_time_on_a_quoted_response_gives_it_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def quote(request: Any, number: int) -> Reply:
        return verdict(request["messages"][0]["content"] + "\nScore: 1")

    monkeypatch.setattr(judge_module, "FORMAT_SECONDS", 0.2)
    with StubServer(quote) as server:
        args = {"url": server.url, "model": "m", "template": "{response}", "pattern": r"(?:^(?:a+)+$|Score: )(\d)", "scale": [0, 1]}
        scoring, _ = BatchScorer.of(RewardConfig(name="judge", args=args, timeout_s=60), "reward")
        attack, fair = (scoring.one(sample(response))[0] for response in ("a" * 60 + "b", "4"))
    assert isinstance(attack, Score) and (attack.value, attack.correct) == (0.0, False), attack
    assert isinstance(fair, Score) and fair.value == 1.0


@pytest.mark.parametrize(
    ("name", "answer", "columns"),
    [("choice", "Madrid", {"options": CITIES}), ("exact", None, {}), ("math", [], {}), ("instruction", None, {}), ("code", None, {})],
)
def test_a_reference_that_cannot_be_read_is_a_failure_whatever_the_response_is(name: str, answer: Any, columns: dict[str, Any]) -> None:
    with scorer(name) as (scoring, _, _):
        for response in ("", "Paris " * 1000, "A", "\ud800"):
            assert isinstance(scoring.one(sample(response, answer, columns))[0], str)


def test_a_function_of_a_user_that_raises_is_a_failure() -> None:
    """Nobody but its author knows whether the response is to blame."""
    config = RewardConfig(name="tests.workers.reward_functions.raises")
    outcome, _ = BatchScorer.of(config, "reward")[0].one(sample("4"))
    assert isinstance(outcome, str)


def test_loops() -> None:
    """Several samples of one loop, some of them suspected, end side by side."""
    with scorer("judge") as (scoring, answer, columns):
        items = {n: sample("x" * 1000 if n % 2 else "4", answer, columns) for n in range(6)}
        results: dict[int, Any] = {}
        scored = scoring(items, 1.0)
        while len(results) < len(items):
            results |= {n: one for n, one in scored.results.items() if one is not None}
            scored = scoring({}, 1.0)
    assert all(isinstance(one, Score) for one in results.values())
