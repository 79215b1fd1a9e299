"""Check environments as their workers load them, before anything starts. This imports users' modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from roll_lite.config.checks.rollout import environment_problems
from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import readable
from roll_lite.config.schema.domains import ChatTemplateConfig, DomainConfig
from roll_lite.config.schema.environments import (
    EndpointEnvironmentConfig,
    FunctionEnvironmentConfig,
    FunctionToolConfig,
    ToolsEnvironmentConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import is_folder, read_text
from roll_lite.models.model_files import chat_templates

ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}, "required": ["text"]},
    },
}
"""Placeholder for the schemas of tools that roll_lite ships: the real ones need a started sandbox, index or server."""


def check_environments(config: RunConfig) -> Iterator[Problem]:
    if vars(config).get("mode") != "train_only":
        for name, domain in config.domains.items():
            yield from readable(_environment(config, f"domains.{name}", domain))


def _environment(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    settings, place = domain.environment, f"{path}.environment"
    if settings is None or any(environment_problems(place, settings)):
        return
    from roll_lite.environments.build import agent_of, play_of, renderer_of, schemas_of, tools_of
    from roll_lite.environments.episode import Calls

    tools: list[Any] = []
    schemas: list[dict[str, Any]] = []
    problems: list[Problem] = []
    match settings:
        case FunctionEnvironmentConfig():
            problems += _mistake(partial(play_of, settings, f"{place}.function", Calls()))
        case EndpointEnvironmentConfig():
            problems += _mistake(partial(agent_of, settings, f"{place}.function", Calls()))
        case ToolsEnvironmentConfig():
            own = {number: tool for number, tool in enumerate(settings.tools) if isinstance(tool, FunctionToolConfig)}
            for number, tool in own.items():
                load = partial(tools_of, tool, f"{place}.tools.{number}", Calls(), settings.turn_timeout_s)
                problems += _mistake(load, tools.append)
            problems += _mistake(partial(schemas_of, tools, place), schemas.extend)
            schemas += [ANY_TOOL] if len(own) < len(settings.tools) else []
    yield from problems
    template, model = domain.template, config.model.path
    if problems or not isinstance(template, ChatTemplateConfig) or not is_folder(model):
        return
    try:
        texts = chat_templates(model) if template.file is None else [read_text(template.file)]
    except ValueError:  # check_data tells
        return
    if not texts:
        return
    from roll_lite.data.templates import load_tokenizer

    yield from _mistake(lambda: renderer_of(domain, load_tokenizer(model), path, schemas))


def _mistake(load: Callable[[], Any], use: Callable[[Any], object] = lambda _: None) -> list[Problem]:
    try:
        with redirect_stdout(sys.stderr):  # `roll-lite check` prints YAML
            use(load())
    except ValueError as error:
        place, _, message = str(error).partition(": ")
        return [Problem(place, message)]
    return []
