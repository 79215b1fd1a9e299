"""Builds a domain's environment from its configuration."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from roll_lite.config.schema.domains import ChatTemplateConfig, DomainConfig
from roll_lite.config.schema.environments import (
    CallFormat,
    FunctionEnvironmentConfig,
    McpToolConfig,
    PythonToolConfig,
    SearchToolConfig,
    ToolConfig,
    ToolsEnvironmentConfig,
)
from roll_lite.data.templates import Tokenizer
from roll_lite.data.user_function import load_function
from roll_lite.environments.episode import Calls, Limits, Play, Player, Renderer, play_class
from roll_lite.environments.python_tool import PythonTool
from roll_lite.environments.rendering import ChatRenderer, PlainRenderer
from roll_lite.environments.tools import LOST, FunctionTool, Tools, play_tools
from roll_lite.files import read_text


def player_of(domain: DomainConfig, tokenizer: Tokenizer, path: str) -> Player:
    """Load the environment of the domain at `path` (YAML). ValueError for a mistake in it."""
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
    schemas: list[dict[str, Any]] = []
    if isinstance(settings, ToolsEnvironmentConfig):
        tools = [tools_of(one, f"{path}.environment.tools.{number}", calls) for number, one in enumerate(settings.tools)]
        schemas = [schema for one in tools for schema in one.schemas]
        names = [schema["function"]["name"] for schema in schemas]
        if len(set(names)) < len(names):
            raise ValueError(f"{path}.environment.tools: the model cannot tell tools of one name apart: {', '.join(names)}")
        play = play_tools(tools, settings.max_result_chars)
    else:
        play = play_of(settings, f"{path}.environment.function", calls)
    return Player(play, renderer_of(domain, settings.call_format, tokenizer, path, schemas), limits, calls)


def tools_of(settings: ToolConfig, path: str, calls: Calls) -> Tools:
    """Load or start what an entry of `environment.tools` at `path` names. ValueError for a mistake in it. Libraries of shipped tools are
    imported only for those."""
    try:
        match settings:
            case PythonToolConfig():
                return PythonTool(settings)
            case SearchToolConfig():
                from roll_lite.environments.search_tool import search_in

                return FunctionTool(search_in(settings), calls)
            case McpToolConfig():
                from roll_lite.environments.mcp_tool import McpTools

                return McpTools(settings)
        return FunctionTool(load_function(settings.name, "name", "arguments -> result"), calls)
    except (ValueError, *LOST) as error:
        raise ValueError(f"{path}: {error}") from error


def play_of(settings: FunctionEnvironmentConfig, path: str, calls: Calls) -> Play:
    found = load_function(settings.function, path, "async (task, policy) -> reward or None", or_class=True)
    if isinstance(found, type):
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if missing:
            raise ValueError(f"{path}: {settings.function!r} has no method {' and no '.join(missing)}; an environment has both")
        _bind(inspect.signature(found), (), settings, path)
        return play_class(found, settings.args, calls)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{path}: {settings.function!r} must be `async def`: it awaits the policy's responses")
    _bind(inspect.signature(found), (None, None), settings, path)
    return partial(found, **settings.args)


def _bind(signature: inspect.Signature, given: tuple[Any, ...], settings: FunctionEnvironmentConfig, path: str) -> None:
    try:
        signature.bind(*given, **settings.args)
    except TypeError as error:
        takes = "`args`" if not given else "a task, the policy and `args`"
        raise ValueError(f"{path}: {settings.function!r} takes {takes}: {error}; its signature is {signature}") from None


def renderer_of(domain: DomainConfig, form: CallFormat | None, tokenizer: Tokenizer, path: str, schemas: list[Any]) -> Renderer:
    template = domain.template
    if not isinstance(template, ChatTemplateConfig):
        return PlainRenderer(tokenizer, f"{path}.template")
    text = None if template.file is None else read_text(template.file)
    ends = domain.sampling.stop_token_ids
    return ChatRenderer(tokenizer, text, template.arguments, schemas, f"{path}.template", form, ends)
