"""Checks of judges and of rewards behind HTTP: one wrong YAML, one problem."""

from __future__ import annotations

import json

import pytest
from config_project import Project
from support_cases import cases

KEY = "sk-secret-0123"
JUDGE = "judges: {main: {path: model}}\n"
ASKS = "domains: {add: {reward: {name: judge, args: {server: main, api: completions, %s}}}}"
REMOTE = "domains: {add: {reward: {name: remote, timeout_s: 10, args: {%s}}}}"
EXTERNAL = "domains: {add: {reward: {name: judge, args: {%s}}}}"


@pytest.mark.parametrize(("yaml", "path", "says"), cases("config/judges"))
def test_problems(project: Project, yaml: str, path: str, says: str) -> None:
    (problem,) = project.problems_of(yaml)
    assert problem.path == path and says in problem.message
    assert KEY not in str(problem)


def test_a_password_with_an_at_sign_is_not_shown(project: Project) -> None:
    problems = project.problems_of(EXTERNAL % "url: 'https://user:sk-1@secret-0123@h/v1', model: m")
    assert any("holds a user or a password" in problem.message for problem in problems)
    assert "secret-0123" not in "".join(map(str, problems))


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


def test_a_key_in_a_judges_body_is_in_no_saved_configuration(project: Project) -> None:
    body = f"extra_body: {{api_key: {KEY}, headers: [{{Authorization: Bearer {KEY}}}]}}"
    project.write("configs/keyed.yaml", f"defaults: [run, _self_]\n{EXTERNAL % f'url: http://h, model: m, {body}'}")
    config = project.load(name="keyed")
    assert KEY in str(config.domains["add"].reward.args) and KEY not in config.model_dump_json()


def test_an_address_is_never_repeated_with_its_secret(project: Project) -> None:
    """Whatever else is wrong beside it."""
    address = f"https://me:{KEY}@h/v1?token={KEY}&page=2"
    for yaml in (EXTERNAL % f"url: '{address}'", f"domains: {{add: {{rewards: {{url: '{address}'}}}}}}", f"experiment: '{address}'"):
        text = "\n".join(map(str, project.problems_of(yaml)))
        assert text and KEY not in text, text
