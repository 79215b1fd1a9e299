"""Checks of judges and of rewards behind HTTP: one wrong YAML, one problem."""

from __future__ import annotations

import json

import pytest
from config_project import Project

KEY = "sk-secret-0123"
JUDGE = "judges: {main: {path: model}}\n"
ASKS = "domains: {add: {reward: {name: judge, args: {server: main, api: completions, %s}}}}"
REMOTE = "domains: {add: {reward: {name: remote, timeout_s: 10, args: {%s}}}}"
EXTERNAL = "domains: {add: {reward: {name: judge, args: {%s}}}}"

PROBLEMS = {
    "an unused judge": (JUDGE, "judges.main", "no domain uses it"),
    "a judge's name": (
        "judges: {a b: {path: model}}\ndomains: {add: {reward: {name: judge, args: {server: a b, api: completions}}}}",
        "judges.a b",
        "part of file names",
    ),
    "no folder": ("judges: {main: {path: nowhere}}\n" + ASKS % "", "judges.main.path", "no such folder"),
    "devices": (
        "judges: {main: {path: model, devices: 3, strategy: {tensor_parallel: 2}}}\n" + ASKS % "",
        "judges.main.devices",
        "3 devices into whole",
    ),
    "no such judge": (
        ASKS.replace("server: main", "server: mian") % "",
        "domains.add.reward.args.server",
        "there is no section `judges` yet",
    ),
    "a misspelt judge": (
        JUDGE + ASKS.replace("server: main", "server: mian") % "",
        "domains.add.reward.args.server",
        "did you mean 'main'?",
    ),
    "a misspelt argument": (
        JUDGE + EXTERNAL % "servr: main, api: completions",
        "domains.add.reward.args.servr",
        "did you mean 'server'?",
    ),
    "a misspelt type": (
        JUDGE + "domains: {add: {reward: {name: juge, args: {server: main}}}}",
        "domains.add.reward.name",
        "did you mean 'judge'?",
    ),
    "a judge with an address": (JUDGE + ASKS % "url: 'http://h/v1'", "domains.add.reward.args.url", "is the run's to say"),
    "no chat template": (JUDGE + (ASKS % "").replace("api: completions, ", ""), "domains.add.reward.args.api", "use completions"),
    "no model": (EXTERNAL % "url: 'http://h/v1'", "domains.add.reward.args", "needs model"),
    "a password in a list": (REMOTE % f"url: ['http://h', 'http://me:{KEY}@h']", "domains.add.reward.args.url.1", "a user or a password"),
    "a password": (REMOTE % f"url: 'http://me:{KEY}@h/get'", "domains.add.reward.args.url", "a user or a password"),
    "a password for a judge": (EXTERNAL % f"url: 'https://me:{KEY}@h/v1', model: m", "domains.add.reward.args.url", "a user or a password"),
    "a signature in the second": (
        REMOTE % f"url: ['https://h', 'https://h?sig={KEY}']",
        "domains.add.reward.args.url.1",
        "a key in its query",
    ),
    "a key in the query": (REMOTE % f"url: 'https://h/get?a=1&api_key={KEY}'", "domains.add.reward.args.url", "a key in its query"),
    "a token in the query": (REMOTE % f"url: 'https://h/get?access_token={KEY}'", "domains.add.reward.args.url", "a key in its query"),
    "where programs run": (
        f"domains: {{add: {{reward: {{name: code, args: {{backend: {{url: 'http://me:{KEY}@h/run'}}}}}}}}}}",
        "domains.add.reward.args.backend.url",
        "a user or a password",
    ),
    "in an engine's arguments": (
        f"actor_infer: {{strategy: {{engine_args: {{download_dir: 's3://me:{KEY}@h'}}}}}}",
        "actor_infer.strategy.engine_args.download_dir",
        "a user or a password",
    ),
    "a scheme": (REMOTE % "url: 'h:80/get'", "domains.add.reward.args.url", "of the form http://"),
    "no address": (REMOTE % "url: []", "domains.add.reward.args.url", "at least one"),
    "the key itself": (REMOTE % f"url: 'http://h', api_key_env: {KEY}", "domains.add.reward.args.api_key_env", "must not stand here"),
    "a key in the body": (
        EXTERNAL % f"url: 'http://h', model: m, extra_body: {{api_key: {KEY}}}",
        "domains.add.reward.args.extra_body",
        "name its variable in api_key_env",
    ),
    "a key in the body's headers": (
        EXTERNAL % f"url: 'http://h', model: m, extra_body: {{headers: [{{Authorization: Bearer {KEY}}}]}}",
        "domains.add.reward.args.extra_body",
        "name its variable in api_key_env",
    ),
    "no variable": (REMOTE % "url: 'http://h', api_key_env: NO_SUCH", "domains.add.reward.args.api_key_env", "no environment variable"),
    "time-outs": (REMOTE % "url: 'http://h', timeout_s: 10", "domains.add.reward.args.timeout_s", "the whole sample has 10"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(project: Project, name: str) -> None:
    yaml, path, message = PROBLEMS[name]
    problems = project.problems_of(yaml)
    assert [(problem.path, message in problem.message) for problem in problems] == [(path, True)], problems
    assert KEY not in "".join(map(str, problems))


def test_judges_that_are_right(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    assert project.problems_of(JUDGE + ASKS % "") == []
    assert project.problems_of(JUDGE + "domains: {add: {reward: {terms: [{name: judge, args: {server: main, api: completions}}]}}}") == []
    assert project.problems_of(EXTERNAL % "url: 'https://h/v1', model: m, api_key_env: JUDGE_KEY") == []
    body = "extra_body: {prompt_cache_key: a, logprobs: true, token: 3, stop_token_ids: [3]}"
    assert project.problems_of(EXTERNAL % f"url: 'https://h/v1', model: m, {body}") == []
    assert project.problems_of(REMOTE % "url: ['http://h', 'http://[::1]:80/x']") == []
    project.write("model/tokenizer_config.json", json.dumps({"chat_template": "x"}))
    assert project.problems_of(JUDGE + (ASKS % "").replace("api: completions, ", "")) == []


def test_judges_have_devices_of_their_own(project: Project) -> None:
    from roll_lite.config.arithmetic import derive
    from roll_lite.config.arithmetic_tables import render

    project.write("configs/judged.yaml", f"defaults: [run, _self_]\njudges: {{main: {{path: model, devices: [0, 3]}}}}\n{ASKS % ''}")
    arithmetic = derive(project.load(name="judged"))
    judge = arithmetic.clusters["judges.main"]
    assert (judge.devices, judge.copies, judge.layout) == ((0, 3), 2, "vllm: 2 replicas")
    assert set(judge.shares_with) == {"actor_train", "actor_infer"}
    assert "judges.main" in render(arithmetic)


def test_an_address_is_never_repeated_with_its_secret(project: Project) -> None:
    """Whatever else is wrong beside it."""
    address = f"https://me:{KEY}@h/v1?token={KEY}&page=2"
    for yaml in (EXTERNAL % f"url: '{address}'", f"domains: {{add: {{rewards: {{url: '{address}'}}}}}}", f"experiment: '{address}'"):
        text = "\n".join(map(str, project.problems_of(yaml)))
        assert text and KEY not in text, text
