"""Mistakes in a domain's environment are told with their places and remedies, all at once, before anything starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema import base
from roll_lite.config.schema.domains import TOOLS_NEED_CHAT
from roll_lite.config.schema.environments import (
    AdapterSection,
    FunctionEnvironmentConfig,
    FunctionToolConfig,
    McpToolConfig,
    PythonToolConfig,
    ToolsEnvironmentConfig,
)
from roll_lite.data.check import check_data
from roll_lite.environments.check import check_environments, template_notes
from roll_lite.files import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
GUESS, CALCULATOR = "domains.guess.environment", "domains.calculator.environment"
GYM = f"{GUESS}={{name: gym, id: FrozenLake-v1}}"
OPENENV = f"{GUESS}={{name: openenv, url: 'http://127.0.0.1:8000', action: message}}"
TOOL = f"{CALCULATOR}.tools.0"
TURNS = "roll_lite.examples.domains.turns"
CASES = "tests.workers.environment_cases"


def test_shipped_environments() -> None:
    guess, calculator = load_config("tiny_guess", CONFIGS), load_config("tiny_calculator", CONFIGS)
    assert isinstance(guess.domains["guess"].environment, FunctionEnvironmentConfig)
    assert guess.domains["guess"].reward.name == "environment"
    assert isinstance(calculator.domains["calculator"].environment, ToolsEnvironmentConfig)
    assert load_config("tiny_grpo", CONFIGS).domains["add"].environment is None


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("tiny_guess", [f"{GUESS}.max_turn=3"], f"{GUESS}.max_turn = 3: unknown key; did you mean 'max_turns'"),
        ("tiny_agent", ["deterministic=true"], "deterministic = true: which of an agent's requests comes first depends on timing"),
        ("tiny_agent", [f"{CALCULATOR}.function=null"], f"{CALCULATOR}.function = null: name either a function or a command"),
        ("tiny_agent", [f"{CALCULATOR}.function=null", f"{CALCULATOR}.command=[no-such-agent]"], "is no program on the PATH"),
        ("tiny_guess", [f"{GUESS}.rewards=per_turn"], f"{GUESS}.rewards = .per_turn.: makes no difference to algorithm.advantage grpo"),
        (
            "tiny_guess",
            [f"{GUESS}.rewards=per_turn", "algorithm.advantage=gigpo", "algorithm.reward.clip=2"],
            f"{GUESS}.rewards = .per_turn.: needs rewards that add up: leave out algorithm.reward.clip",
        ),
        (
            "tiny_guess",
            [f"{GUESS}.rewards=per_turn", "algorithm.advantage=gigpo", "domains.guess.reward={name: exact}"],
            f"{GUESS}.rewards = .per_turn.: needs the environment's rewards as the score",
        ),
        ("tiny_guess", [f"{GUESS}.parallel=0"], f"{GUESS}.parallel = 0: expected integer > 0"),
        ("tiny_guess", [f"{GUESS}.name=tolls"], f"{GUESS}.name = .tolls.: expected one of function, tools"),
        ("tiny_guess", [f"{GUESS}={{type: tools}}"], f"{GUESS}.type = .tools.: is called name here"),
        ("tiny_guess", [f"{GUESS}.function={TURNS}.Gues"], f"{GUESS}.function = .*has no 'Gues'; did you mean 'Guess'"),
        ("tiny_guess", [f"{GUESS}.function={CASES}.second_chance", f"{GUESS}.args.tries=2"], f"{GUESS}.args.tries = 2: .*no such argument"),
        ("tiny_guess", [f"{GUESS}.function={TURNS}.calculate"], f"{GUESS}.function = .*take a task and the policy as its first arguments"),
        ("tiny_guess", [f"~{GUESS}"], "domains.guess.reward: is needed, since without `environment` nothing else scores"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[{TURNS}.calculat]"], f"{TOOL}.name = .*did you mean 'calculate'"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[]"], f"{CALCULATOR}.tools = \\[\\]: expected list of \\(section\\), at least one"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=python"], f"{CALCULATOR}.tools = .python.: expected list of .*; write \\[python\\]"),
        (
            "tiny_calculator",
            [f"{CALCULATOR}.tools=[pyton]"],
            f"{TOOL}.name = .pyton.: expected one of python, search, mcp, a dotted path; did you mean 'python'",
        ),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[{{timeout_s: 3}}]"], f"{TOOL}.name.* expected one of python, search, mcp"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[7]"], f"{TOOL} = 7: expected one of python"),
        (
            "tiny_calculator",
            [f"{CALCULATOR}.tools=[{{name: python, timeout: 3}}]"],
            f"{TOOL}.timeout = 3: unknown key; did you mean 'timeout_s'",
        ),
        (
            "tiny_calculator",
            [f"{CALCULATOR}.tools=[{{name: python, url: x}}]"],
            f"{TOOL}.url = .x.: is only used by name: mcp; python has the keys",
        ),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[{{name: a.b, files: x}}]"], f"{TOOL}.files = .x.: is only used by name: python"),
        (
            "tiny_calculator",
            [f"{CALCULATOR}.tools=[{TURNS}.calculate, {{name: python, timeout_s: 10}}]"],
            f"{CALCULATOR}.tools.1.timeout_s = 10.*: is not below turn_timeout_s \\(10\\)",
        ),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[search]"], f"{TOOL}.corpus: is missing"),
        (
            "tiny_calculator",
            [f"{CALCULATOR}.tools=[{{name: search, corpus: no.txt}}]"],
            f"{TOOL}.corpus = .*no.txt.: there is no such file",
        ),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[mcp]"], f"{TOOL}: one server is needed: set either `command` or `url`"),
        ("tiny_calculator", [f"{CALCULATOR}.max_result_chars=10"], f"{CALCULATOR}.max_result_chars = 10: expected integer >= 200"),
        ("tiny_calculator", ["~domains.calculator.reward"], "domains.calculator.reward: is needed, since tools give no rewards"),
        (
            "tiny_calculator",
            ["domains.calculator.template.name=plain"],
            "template.name = .plain.: tools are described to the model by a chat",
        ),
        ("tiny_guess", [GYM, f"{GUESS}.function={TURNS}.Guess"], f"{GUESS}.id = .*: name one environment: either its registered `id`"),
        ("tiny_guess", [f"{GUESS}={{name: gym}}"], f"{GUESS}.id = null: name one environment"),
        ("tiny_guess", [f"{GUESS}={{name: gym, function: {TURNS}.Gues}}"], f"{GUESS}.function = .*did you mean 'Guess'"),
        ("tiny_guess", [GYM, f"{GUESS}.action={TURNS}.calculat"], f"{GUESS}.action = .*did you mean 'calculate'"),
        ("tiny_guess", [OPENENV, f"{GUESS}.url=localhost:8000"], f"{GUESS}.url = .*: is no address of a server; write one such as http"),
        ("tiny_guess", [OPENENV, f"{GUESS}.observation={TURNS}.calculat"], f"{GUESS}.observation = .*did you mean 'calculate'"),
    ],
)
def test_mistakes(name: str, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda package: object())
    with pytest.raises(ConfigError) as refused:
        load_config(name, CONFIGS, overrides)
    assert re.search(says, str(refused.value)), str(refused.value)


@pytest.mark.parametrize(
    "section",
    [
        "{name: gym, id: FrozenLake-v1}",
        "{name: textarena, id: Mastermind-v0}",
        "{name: reasoning_gym, dataset: chain_sum}",
        "{name: openenv, url: 'http://127.0.0.1:8000', action: message}",
        "{name: verifiers, id: wordle}",
    ],
)
def test_a_missing_package_is_named_with_its_extra(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named like the section; with the package nothing is wrong, and the environment gives the rewards."""
    name = section.split(",")[0].removeprefix("{name: ")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    monkeypatch.setattr(base, "find_spec", lambda package: None)
    with pytest.raises(ConfigError) as refused:
        load_config("tiny_guess", CONFIGS, [f"{GUESS}={section}"])
    assert f'{GUESS}.name = "{name}": its package is not installed: pip install "roll_lite[{name}]"' in str(refused.value)
    monkeypatch.setattr(base, "find_spec", lambda package: object())
    settings = load_config("tiny_guess", CONFIGS, [f"{GUESS}={section}"]).domains["guess"].environment
    assert isinstance(settings, AdapterSection)
    assert extras[name][0].startswith(settings.package.replace("_", "-"))


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda package: object())
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "roll_lite.environments.adapters.gym", raising=False)
    with pytest.raises(ConfigError, match=f"{GUESS}.name: importing gymnasium failed: import of gymnasium halted"):
        load_config("tiny_guess", CONFIGS, [GYM], further=[check_environments])


def test_tools_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda package: object())
    given = f"{CALCULATOR}.tools=[{TURNS}.calculate, python, {{name: mcp, command: [server, --all]}}, {{name: {TURNS}.calculate}}]"
    environment = load_config("tiny_calculator", CONFIGS, [given, f"{CALCULATOR}.turn_timeout_s=20"]).domains["calculator"].environment
    assert isinstance(environment, ToolsEnvironmentConfig)
    function = FunctionToolConfig(name=f"{TURNS}.calculate")
    assert environment.tools == [
        function,
        PythonToolConfig(name="python"),
        McpToolConfig(name="mcp", command=["server", "--all"]),
        function,
    ]


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r'tools.0.name = "mcp": its package is not installed: pip install "roll_lite\[mcp\]"'):
        load_config("tiny_calculator", CONFIGS, [f"{CALCULATOR}.tools=[{{name: mcp, url: 'http://localhost'}}]"])


def test_the_column_of_files(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": "1", "answer": "1", "files": None}, {"prompt": "1", "answer": "1", "files": ["a"]}]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    says: list[str] = []
    data_section = f"domains.calculator.data={{train: {data}, validation: {data}}}"
    for column in ("files", "file"):
        tools = f"{CALCULATOR}.tools=[{{name: python, files: {column}, timeout_s: 1}}]"
        config = load_config("tiny_calculator", CONFIGS, [tools, data_section])
        says += map(str, check_data(config))
    assert re.search(f"{TOOL}.files = .files.: .*line 2: must be a mapping of file names to texts", says[0])
    assert re.search(f"{TOOL}.files = .file.: .* has no such column; did you mean 'files'", says[-1])


OURS = '''
import functools
print("an import may print")
class Base:
    def reset(self, task): ...
class NoStep(Base): ...
class NoTask(Base):
    def reset(self): ...
    def step(self, message): ...
class TwoMessages(Base):
    def step(self, message, other): ...
class Closes(Base):
    @staticmethod
    def step(message): ...
    def close(self, now): ...
class Right(Base):
    @staticmethod
    def step(message): ...
    async def close(self, now=True): ...
def plain(task, policy): ...
def logged(function):
    @functools.wraps(function)
    def inner(task): ...
    del inner.__wrapped__
    return inner
@logged
def one_input(task, endpoint): ...
def unhinted(text):
    """Say it.

    Args:
        text: What to say.
    """
def undescribed(text: str): ...
def search(query: str, *more: str): ...
def say(text: str) -> str:
    """Say it.

    Args:
        text: What to say.
    """
'''
NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("tiny_guess", [f"{GUESS}.function=ours.NoStep"], f"{GUESS}.function: 'ours.NoStep' has no method step; an environment has both"),
        ("tiny_guess", [f"{GUESS}.function=ours.NoTask"], f"{GUESS}.function: 'ours.NoTask.reset' takes self, a task: too many positional"),
        (
            "tiny_guess",
            [f"{GUESS}.function=ours.TwoMessages"],
            "'ours.TwoMessages.step' takes self, a message: missing a required argument",
        ),
        ("tiny_guess", [f"{GUESS}.function=ours.Closes"], "'ours.Closes.close' takes self: missing a required argument: 'now'"),
        ("tiny_guess", [f"{GUESS}.function=ours.Right", f"{GUESS}.args={{n: 1}}"], f"{GUESS}.function: 'ours.Right' takes `args`"),
        ("tiny_guess", [f"{GUESS}.function=ours.plain"], f"{GUESS}.function: 'ours.plain' must be `async def`"),
        ("tiny_guess", [f"{GUESS}.function=fails.play"], f"{GUESS}.function = .fails.play.: importing fails failed: SystemExit: no key"),
        (
            "tiny_agent",
            [f"{CALCULATOR}.function=ours.one_input"],
            f"{CALCULATOR}.function = .ours.one_input.: the function has to take a task and the endpoint",
        ),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[ours.unhinted]"], f"{TOOL}: unhinted: .*text.*; write a type hint for each argument"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[ours.undescribed]"], f"{TOOL}: undescribed: .*no docstring!; write a type hint"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[ours.search]"], f"{TOOL}: search: the model cannot be told about .more"),
        (
            "tiny_calculator",
            [f"{CALCULATOR}.tools=[ours.say, ours.say]"],
            f"{CALCULATOR}.tools: the model cannot tell tools of one name apart",
        ),
        *(
            ("tiny_calculator", [f"{CALCULATOR}.tools=[{tool}]", "domains.calculator.template.file=no_tools.jinja"], says)
            for tool in ("ours.say", "{name: python, timeout_s: 1}")
            for says in ["domains.calculator.template: the chat template ignores tools; name a template for .* in .*template.file"]
        ),
    ],
)
def test_what_only_an_import_tells(
    name: str, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "fails.py").write_text("async def play(task, policy): ...\nraise SystemExit('no key')")
    (tmp_path / "no_tools.jinja").write_text(NO_TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "ours", None)  # whatever is imported now goes after the test
    del sys.modules["ours"]
    overrides = [one.replace("no_tools.jinja", str(tmp_path / "no_tools.jinja")) for one in overrides]
    with pytest.raises(ConfigError) as refused:
        load_config(name, CONFIGS, overrides, further=[check_environments])
    assert re.search(says, str(refused.value)), str(refused.value)
    assert len(refused.value.problems) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["tiny_guess", "tiny_calculator", "tiny_agent"])
def test_nothing_is_wrong_with_shipped_environments(name: str) -> None:
    load_config(name, CONFIGS, further=[check_environments])


def test_one_mistake_is_told_once() -> None:
    """What is found without an import is not told again by one."""
    with pytest.raises(ConfigError) as refused:
        load_config("tiny_guess", CONFIGS, [f"{GUESS}.function={TURNS}.Gues"], further=[check_environments])
    assert len(refused.value.problems) == 1


DROPS_RESULTS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}: {{ m.content if m.role != 'tool' or loop.last else 'seen' }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, []),
        (
            NO_TOOLS,
            ["the chat template ignores tools; name a template .*template.file, .*; until then, an agent's requests with tools are"],
        ),
        (DROPS_RESULTS, ["in a conversation with a tool call, an episode's tokens read '.*Found a.*writes '.*seen"]),
    ],
)
def test_templates_of_agents_are_tried_with_a_tool(template: str | None, says: list[str], tmp_path: Path) -> None:
    overrides = []
    if template is not None:
        (tmp_path / "own.jinja").write_text(template)
        overrides = [f"domains.calculator.template.file={tmp_path / 'own.jinja'}", f"{CALCULATOR}.call_format=hermes"]
    config = load_config("tiny_agent", CONFIGS, overrides, further=[check_environments])
    told = list(template_notes(config))
    assert [place for place, _ in told] == ["domains.calculator.template"] * len(says)
    assert all(re.search(pattern, message, re.DOTALL) for pattern, (_, message) in zip(says, told, strict=True)), told


@pytest.mark.parametrize(("name", "domain"), [("tiny_calculator", "calculator"), ("tiny_guess", "guess")])
def test_what_a_template_renders_differently_is_noted(name: str, domain: str) -> None:
    assert list(template_notes(load_config(name, CONFIGS))) == []
    file = ROOT / "tests/environments/templates/qwen3.jinja"  # leaves out earlier thoughts
    config = load_config(name, CONFIGS, [f"domains.{domain}.template.file={file}"])
    [(place, message)] = template_notes(config)
    assert place == f"domains.{domain}.template" and re.search("in a conversation with .* an episode's tokens read", message)


def test_agents_with_a_plain_template_get_no_tools() -> None:
    config = load_config("tiny_agent", CONFIGS, ["domains.calculator.template.name=plain"], further=[check_environments])
    [(place, message)] = template_notes(config)
    assert place == "domains.calculator.template.name"
    assert message == f"{TOOLS_NEED_CHAT}; until then, an agent's requests with tools are refused"


def test_a_tokenizer_that_cannot_be_loaded_is_told_without_a_traceback(tmp_path: Path) -> None:
    model = shutil.copytree(load_config("tiny_agent", CONFIGS).model.path, tmp_path / "model")
    (model / "tokenizer_config.json").write_text('{"extra_special_tokens": 5}')
    overrides = [f"model.path={model}", "domains.calculator.template.name=plain"]
    [(place, message)] = template_notes(load_config("tiny_agent", CONFIGS, overrides, further=[check_environments]))
    assert place == "model.path" and message.startswith(f"no tokenizer could be loaded from {model}: ")
