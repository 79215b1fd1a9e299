from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from roll_lite.config.schema.domains import ENVIRONMENT_REWARD, TOOLS_NEED_CHAT, ChatTemplateConfig, DomainConfig
from roll_lite.config.schema.environments import (
    AdapterSection,
    EndpointEnvironmentConfig,
    FunctionEnvironmentConfig,
    GymEnvironmentConfig,
    McpToolConfig,
    OpenEnvEnvironmentConfig,
    PythonToolConfig,
    ReasoningGymEnvironmentConfig,
    SearchToolConfig,
    TextArenaEnvironmentConfig,
    ToolConfig,
    ToolsEnvironmentConfig,
    VerifiersEnvironmentConfig,
)
from roll_lite.config.user_function import load_function
from roll_lite.data.row_values import messages_of
from roll_lite.data.samples import Prompt
from roll_lite.data.templates import Tokenizer
from roll_lite.environments.agents import Agent, command_agent, play_agent
from roll_lite.environments.base import Task
from roll_lite.environments.episode import Calls, EpisodeFunction, Limits, Player, Renderer, play_class
from roll_lite.environments.python_tool import PythonTool
from roll_lite.environments.rendering import ANY_TOOL, ChatRenderer, PlainRenderer
from roll_lite.environments.tools import LOST, FunctionTool, Tools, play_tools
from roll_lite.files import read_text

TOOL_SETS = 16
METHODS = {"reset": ("a task",), "step": ("a message",), "close": ()}


def player_of(domain: DomainConfig, tokenizer: Tokenizer, path: str, host: str) -> Player:
    """Load the environment of the domain at YAML path `path`; ValueError if its settings are wrong. `host`: address of the agents'
    endpoint."""
    settings = domain.environment
    assert settings is not None
    limits = Limits(
        settings.max_turns,
        settings.turn_timeout_s,
        domain.sampling.max_prompt_tokens,
        settings.max_turn_tokens,
        last_reward=settings.rewards == "last",
    )
    calls = Calls()
    play, schemas = _play(domain, tokenizer, path, host, calls)
    return Player(play, renderer_of(domain, tokenizer, path, schemas), limits, calls)


def _play(
    domain: DomainConfig, tokenizer: Tokenizer, domain_path: str, host: str, calls: Calls
) -> tuple[EpisodeFunction, list[dict[str, Any]]]:
    path = f"{domain_path}.environment"
    match domain.environment:
        case FunctionEnvironmentConfig() as settings:
            return play_of(settings, f"{path}.function", calls), []
        case ToolsEnvironmentConfig() as settings:
            limits = settings.turn_timeout_s, settings.start_timeout_s
            tools = [tools_of(one, f"{path}.tools.{number}", calls, *limits) for number, one in enumerate(settings.tools)]
            return play_tools(tools, settings.max_result_chars), schemas_of(tools, path)
        case EndpointEnvironmentConfig() as settings:
            agent = agent_of(settings, f"{path}.function", calls)
            return play_agent(agent, host, renderers_of(domain, tokenizer, domain_path), domain.reward.name == ENVIRONMENT_REWARD), []
        case AdapterSection() as settings:
            return adapter_of(settings, path, calls, domain.reward.name == ENVIRONMENT_REWARD)
    raise AssertionError(domain.environment)


def adapter_of(
    settings: AdapterSection, path: str, calls: Calls, gives_reward: bool = True
) -> tuple[EpisodeFunction, list[dict[str, Any]]]:
    """Load another project's environment. Return its episode function and tool schemas; ValueError for a mistake. `gives_reward`: its
    rewards are the score."""
    try:
        match settings:
            case GymEnvironmentConfig():
                from roll_lite.environments.adapters.gym import play_gym

                return play_gym(settings, path, calls), []
            case TextArenaEnvironmentConfig():
                from roll_lite.environments.adapters.textarena import play_textarena

                return play_textarena(settings, path, calls), []
            case ReasoningGymEnvironmentConfig():
                from roll_lite.environments.adapters.reasoning_gym import play_reasoning_gym

                return play_reasoning_gym(settings, path, calls), []
            case OpenEnvEnvironmentConfig():
                from roll_lite.environments.adapters.openenv import play_openenv

                return play_openenv(settings, path, calls, gives_reward), []
            case VerifiersEnvironmentConfig():
                from roll_lite.environments.adapters.verifiers import play_verifiers

                return play_verifiers(settings, path)
    except ImportError as error:
        raise ValueError(f"{path}.name: importing {settings.package} failed: {error}") from error
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # other projects' code may raise anything, also as it is imported
        raise ValueError(f"{path}.name: {settings.package} failed: {type(error).__name__}: {error}") from error
    raise AssertionError(settings)


def task_of(domain: DomainConfig, prompt: Prompt, seed: int) -> Task:
    template, column = domain.template, domain.data.prompt
    if isinstance(template, ChatTemplateConfig):
        messages = messages_of({column: prompt.question}, column, template.system)
    else:
        messages = [{"role": "user", "content": prompt.text}]
    return Task(messages, prompt.answer, prompt.columns, seed % 2**31)


def tools_of(settings: ToolConfig, path: str, calls: Calls, turn_timeout_s: float, start_timeout_s: float) -> Tools:
    """Load the tools of the entry at YAML path `path`; ValueError for a mistake."""
    try:
        match settings:
            case PythonToolConfig():
                return PythonTool(settings, turn_timeout_s)
            case SearchToolConfig():
                from roll_lite.environments.search_tool import search_in

                return FunctionTool(search_in(settings), calls)
            case McpToolConfig():
                from roll_lite.environments.mcp_tool import McpTools

                return McpTools(settings, start_timeout_s)
        return FunctionTool(load_function(settings.name, "name"), calls)
    except (ValueError, *LOST) as error:
        raise ValueError(f"{path}: {error}") from error


def schemas_of(tools: Sequence[Tools], path: str) -> list[dict[str, Any]]:
    schemas = [schema for one in tools for schema in one.schemas]
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}.tools: the model cannot tell tools of one name apart: {', '.join(names)}")
    return schemas


def agent_of(settings: EndpointEnvironmentConfig, path: str, calls: Calls) -> Agent:
    if settings.command is not None:
        return command_agent(settings.command)
    assert settings.function is not None
    function = load_function(settings.function, path)
    _bind(inspect.signature(function), ("a task", "the endpoint"), settings.function, settings.args, path)
    return partial(calls, function, **settings.args)


def play_of(settings: FunctionEnvironmentConfig, path: str, calls: Calls) -> EpisodeFunction:
    found = load_function(settings.function, path, or_class=True)
    if isinstance(found, type):
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if missing:
            raise ValueError(f"{path}: {settings.function!r} has no method {' and no '.join(missing)}; an environment has both")
        _bind(inspect.signature(found), (), settings.function, settings.args, path)
        for name, given in METHODS.items():
            if (method := getattr(found, name, None)) is not None:
                is_plain = not isinstance(inspect.getattr_static(found, name), staticmethod | classmethod)
                _bind(inspect.signature(method), ("self", *given) if is_plain else given, f"{settings.function}.{name}", None, path)
        return play_class(found, settings.args, calls)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{path}: {settings.function!r} must be `async def`: it awaits the policy's responses")
    _bind(inspect.signature(found), ("a task", "the policy"), settings.function, settings.args, path)
    return partial(found, **settings.args)


def _bind(signature: inspect.Signature, given: tuple[str, ...], name: str, args: dict[str, Any] | None, path: str) -> None:
    try:
        signature.bind(*given, **(args or {}))
    except TypeError as error:
        takes = ", ".join([*given, *([] if args is None else ["and `args`"])]) if given else "`args`"
        raise ValueError(f"{path}: {name!r} takes {takes}: {error}; its signature is {signature}") from None


def renderer_of(domain: DomainConfig, tokenizer: Tokenizer, path: str, tools: Sequence[dict[str, Any]]) -> Renderer:
    template = domain.template
    assert domain.environment is not None
    if not isinstance(template, ChatTemplateConfig):
        if tools:
            raise ValueError(f"{path}.template.name: {TOOLS_NEED_CHAT}")
        return PlainRenderer(tokenizer, f"{path}.template", template.text)
    text = None if template.file is None else read_text(template.file)
    form, ends = domain.environment.call_format, domain.sampling.stop_token_ids
    return ChatRenderer(tokenizer, text, template.arguments, tools, f"{path}.template", form, ends)


def note_on_tools(domain: DomainConfig, tokenizer: Tokenizer, path: str) -> str | None:
    """Describe how the domain's template fails on an agent's tools, or renders a whole conversation differently; None if neither."""
    try:
        return renderer_of(domain, tokenizer, path, [ANY_TOOL]).difference()
    except ValueError as error:
        without = renderer_of(domain, tokenizer, path, []).difference()
        return f"{error}; until then, an agent's requests with tools are refused" + (f". {without}" if without else "")


def renderers_of(domain: DomainConfig, tokenizer: Tokenizer, path: str) -> Callable[[Sequence[dict[str, Any]]], Renderer]:
    @lru_cache(TOOL_SETS)
    def renderer(tools: str) -> Renderer:
        return renderer_of(domain, tokenizer, path, json.loads(tools))

    return lambda tools: renderer(json.dumps(tools))
