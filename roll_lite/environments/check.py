"""Check environments as their workers load them, before anything starts. This imports users' modules."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import readable
from roll_lite.config.schema.domains import TOOLS_NEED_CHAT, ChatTemplateConfig, DomainConfig, PlainTemplateConfig
from roll_lite.config.schema.environments import (
    AdapterSection,
    EndpointEnvironmentConfig,
    FunctionEnvironmentConfig,
    FunctionToolConfig,
    McpToolConfig,
    ToolsEnvironmentConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import is_folder, read_text
from roll_lite.models.model_files import chat_templates


def check_environments(config: RunConfig, makes: bool = True) -> Iterator[Problem]:
    """Yield problems of environments. `makes`: also make one environment of each adapter, and ask MCP servers for their tools."""
    if vars(config).get("mode") != "train_only":
        for name, domain in config.domains.items():
            yield from readable(_environment(config, f"domains.{name}", domain, makes))


def _environment(config: RunConfig, path: str, domain: DomainConfig, makes: bool) -> Iterator[Problem]:
    settings, place = domain.environment, f"{path}.environment"
    if settings is None or settings.mistakes():
        return
    from roll_lite.environments.build import adapter_of, agent_of, play_of, renderer_of, schemas_of, tools_of
    from roll_lite.environments.episode import Calls
    from roll_lite.environments.rendering import ANY_TOOL

    tools: list[Any] = []
    schemas: list[dict[str, Any]] = []
    problems: list[Problem] = []
    match settings:
        case FunctionEnvironmentConfig():
            problems += _mistake(partial(play_of, settings, f"{place}.function", Calls()))
        case EndpointEnvironmentConfig():
            problems += _mistake(partial(agent_of, settings, f"{place}.function", Calls()))
        case AdapterSection() if makes:
            load = _in_time(partial(adapter_of, settings, place, Calls()), f"{place}.name", settings.start_timeout_s)
            problems += _mistake(load, lambda made: schemas.extend(made[1]))
        case ToolsEnvironmentConfig():
            kinds = (FunctionToolConfig, McpToolConfig) if makes else FunctionToolConfig
            loaded = {number: tool for number, tool in enumerate(settings.tools) if isinstance(tool, kinds) and not tool.mistakes()}
            for number, tool in loaded.items():
                limits = settings.turn_timeout_s, settings.start_timeout_s
                problems += _mistake(partial(tools_of, tool, f"{place}.tools.{number}", Calls(), *limits), tools.append)
            problems += _mistake(partial(schemas_of, tools, place), schemas.extend)
            schemas += [ANY_TOOL] if len(loaded) < len(settings.tools) else []
    if schemas and not isinstance(domain.template, ChatTemplateConfig):
        problems.append(Problem(f"{path}.template.name", TOOLS_NEED_CHAT, domain.template.name))
    yield from problems
    if not problems and _has_chat_template(config, domain):
        from roll_lite.data.templates import load_tokenizer

        yield from _mistake(lambda: renderer_of(domain, load_tokenizer(config.model.path), path, schemas))


def _has_chat_template(config: RunConfig, domain: DomainConfig) -> bool:
    template, model = domain.template, config.model.path
    if not isinstance(template, ChatTemplateConfig) or not is_folder(model):
        return False
    try:
        return bool(chat_templates(model) if template.file is None else [read_text(template.file)])
    except ValueError:  # reported by check_data
        return False


def template_notes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (YAML path, message) for templates that cannot render agents' tools, or render episodes differently."""
    for name, domain in config.domains.items():
        settings, path = domain.environment, f"domains.{name}"
        is_agent = isinstance(settings, EndpointEnvironmentConfig)
        is_plain_agent = is_agent and isinstance(domain.template, PlainTemplateConfig)
        if settings is not None and (is_plain_agent or _has_chat_template(config, domain)):
            from roll_lite.data.templates import load_tokenizer
            from roll_lite.environments.build import note_on_tools, renderer_of
            from roll_lite.environments.rendering import ANY_TOOL

            tools = [ANY_TOOL] if isinstance(settings, ToolsEnvironmentConfig) else []
            try:
                tokenizer = load_tokenizer(config.model.path)
                note = note_on_tools(domain, tokenizer, path) if is_agent else renderer_of(domain, tokenizer, path, tools).difference()
            except ValueError as error:
                note = str(error)
            if note:
                place, _, message = note.partition(": ")
                yield place, message


def _mistake(load: Callable[[], Any], use: Callable[[Any], object] = lambda _: None) -> list[Problem]:
    try:
        with redirect_stdout(sys.stderr):  # `roll-lite check` prints YAML
            use(load())
    except ValueError as error:
        place, _, message = str(error).partition(": ")
        return [Problem(place, message)]
    return []


def _in_time(load: Callable[[], Any], path: str, seconds: float) -> Callable[[], Any]:
    """Wrap `load` to run in a thread, as in workers, and to raise ValueError after `seconds`."""
    from roll_lite.environments.episode import Calls

    def loaded() -> Any:
        try:
            return asyncio.run(asyncio.wait_for(Calls()(load), seconds))
        except TimeoutError:
            raise ValueError(f"{path}: was not ready within {seconds:g} s (start_timeout_s)") from None

    return loaded
