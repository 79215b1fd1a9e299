from __future__ import annotations

import pytest
from config_project import Project

from roll_lite.config.problems import hidden, show
from roll_lite.files import first_line

SECRET = "sk-LITERAL"


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("wrong\n  and why"), "wrong"), (ValueError("\n late"), "late"), (TimeoutError(), "TimeoutError"), (KeyError("a"), "'a'")],
    ids=str,
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


OVERRIDES = {
    "an argument that is unknown": f"domains.add.reward.args.api_key={SECRET}",
    "in a section": f"domains.add.reward.args={{api_key: {SECRET}, headers: {{X-Auth-Token: {SECRET}}}}}",
    "a section that is unknown": f"wandb={{api_key: {SECRET}, ids: [1]}}",
    "a key of the top": f"wandb_api_key={SECRET}",
    "a list of them": f"passwords.token=[{SECRET}]",
    "no setting": f"wandb_api_key: {SECRET}",
    "no setting, in quotes": f"wandb: {{'password': '{SECRET}'}}",
    "no YAML": f"domains.add.reward.args={{api_key: {SECRET}",
    "a placeholder": f"domains.add.reward.args.api_key={{{SECRET}}}",
    "a model's path": f"model.path=https://u:{SECRET}@h/x",
    "a path": f"domains.add.data.train=s3://AKIA:{SECRET}@bucket/x.jsonl",
    "to go on from": f"checkpoint.resume=s3://AKIA:{SECRET}@bucket",
    "without a scheme": f"model.path=u:{SECRET}@h/x",
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_no_message_repeats_a_secret(project: Project, name: str) -> None:
    text = "\n".join(map(str, project.problems(OVERRIDES[name])))
    assert text and SECRET not in text, text


def test_nor_one_of_a_file(project: Project) -> None:
    text = "\n".join(map(str, project.problems_of(f"wandb_api_key: {SECRET}\ndomains: {{add: {{secret: '{SECRET} of mine'}}}}")))
    assert "wandb_api_key = " in text and SECRET not in text, text


def test_below_a_secret(project: Project) -> None:
    """What stands there is no section, and is not shown."""
    project.write("configs/keyed.yaml", f"defaults: [run, _self_]\ndomains: {{add: {{reward: {{args: {{api_key: {SECRET}}}}}}}}}")
    text = "\n".join(map(str, project.problems("domains.add.reward.args.api_key.x=1", name="keyed")))
    assert "not a section" in text and SECRET not in text, text


def test_what_is_no_secret_is_shown() -> None:
    assert show({"api_key_env": "KEY", "max_tokens": 3, "seconds_per_token": 4, "api_key": "${oc.env:KEY}"}) == (
        '{"api_key_env": "KEY", "max_tokens": 3, "seconds_per_token": 4, "api_key": "${oc.env:KEY}"}'
    )
    assert show("a: b@c, 10:30") == '"a: b@c, 10:30"' and show("/data/x.jsonl") == '"/data/x.jsonl"'
    assert hidden("steps:3") == "steps:3" and hidden("max_tokens=x") == "max_tokens=x" and hidden("api_key_env=KEY") == "api_key_env=KEY"
