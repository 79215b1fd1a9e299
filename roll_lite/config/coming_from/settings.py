"""Reads the settings in another trainer's YAML file or shell script, with their lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.problems import ConfigError, Problem, dotted

FAILED = object()
EXPANSION = r"\$\(\(.*?\)\)(?!\))|\$\((?:[^()]|\([^()]*\))*\)|\$\{(?:[^{}]|\{[^{}]*\})*\}|\$(?:[A-Za-z_]\w*|[\w@*])"
_PART = re.compile(rf"""(?<!\S)\#[^\n]*|{EXPANSION}|'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::?-(?P<default>.*))?\}?", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(?P<open>\(?)(.*)", re.DOTALL)
_END = re.compile(r"[|&;]+|\d?[<>].*")
_ARGUMENT = re.compile(r"--([\w.-]+)|(?:--|\+{0,2})([\w@/.-]+)=(.*)", re.DOTALL)
_BEFORE_ASSIGNMENT = re.compile(r"export|local|readonly|declare|-a|then|do|else")


@dataclass(frozen=True)
class Given:
    """Setting in a file."""

    key: str
    value: Any
    line: int


def evaluate(expression: str, **names: Any) -> Any:
    """Value of a Jinja expression that sees `names` only. An undefined name is None; FAILED if it cannot be computed."""
    try:
        return SandboxedEnvironment().compile_expression(expression)(**names)
    except (TypeError, ValueError, ArithmeticError, AttributeError, TemplateError):
        return FAILED


def from_yaml(text: str, file: str) -> list[Given]:
    """Settings by dotted key; `${...}` is resolved if this file has its value."""
    source = parse_yaml(text, file)
    if source.problems or not isinstance(source.data, dict):
        raise ConfigError(file, source.problems or [Problem(file, "holds no settings; name the trainer's YAML file")])
    tree = OmegaConf.create(source.data)

    def settings(value: Any, path: tuple[str, ...]) -> Iterator[Given]:
        if value and isinstance(value, dict):
            for key, inner in value.items():
                yield from settings(inner, (*path, key))
            return
        if isinstance(value, str) and "${" in value:
            with suppress(OmegaConfBaseException):
                value = OmegaConf.select(tree, dotted(path))
        yield Given(dotted(path), None if value == "None" else value, source.lines[path])

    return list(settings(source.data, ()))


def from_script(text: str, file: str, is_known: Callable[[str], object]) -> list[Given]:
    """Arguments (key=value, --key value ..., --key=value) of all commands and arrays that have a known one."""
    found: list[Given] = []
    for command in _commands(text):
        start = len(found)
        for word, line in command:
            word = word if "(" in word else word.removesuffix(")")
            if word in ("--", "-m"):
                del found[start:]
            elif match := _ARGUMENT.fullmatch(word):
                found.append(Given(match[1] or match[2], [] if match[1] else [_value(match[3])], line))
            elif found[start:] and word:
                found[-1].value.append(_value(word))
        if not any(is_known(one.key) for one in found[start:]):
            del found[start:]
    if not found:
        raise ConfigError(file, [Problem(file, "has no command with settings of this trainer; name the script that starts it")])
    return [Given(one.key, one.value[0] if len(one.value) == 1 else one.value or True, one.line) for one in found]


def _value(text: str) -> Any:
    source = parse_yaml(text, "")
    is_text = source.problems or (isinstance(source.data, dict) and text[0] != "{")
    return text if is_text else None if text == "None" else source.data


def _commands(text: str) -> Iterator[list[tuple[str, int]]]:
    """Commands and arrays of a shell script: words with their lines, variables and arithmetic filled in. All branches are read."""
    variables: dict[str, str] = {}
    command: list[tuple[str, int]] = []
    before, is_array = "", False
    for number, line in enumerate(text.splitlines(), 1):
        goes_on = line.rstrip().endswith("\\") or bool(command and line.lstrip().startswith("#"))
        before += line.rstrip().removesuffix("\\")
        try:
            words = shlex.split(_filled(before, variables))
        except ValueError:  # a quotation that ends in a later line
            before += "\n"
            continue
        before = ""
        for word in words:
            match = None if command else _ASSIGNMENT.fullmatch(word)
            is_array = is_array or bool(match and match["open"])
            if match and not is_array:
                variables[match[1]] = variables.get(match[1], "") * len(match[2]) + match[4]
            elif _END.fullmatch(word):
                yield command
                command, is_array = [], False
            elif command or not _BEFORE_ASSIGNMENT.fullmatch(word):
                command.append((match[4] if match else word, number))
        if not goes_on and (not is_array or line.rstrip().endswith(")")):
            yield command
            command, is_array = [], False
    yield command


def _filled(text: str, variables: dict[str, str]) -> str:
    """Shell text without comments, with its expansions outside single quotes."""

    def part(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] == '"':
            return re.sub(EXPANSION, lambda one: _expanded(one[0], variables).replace('"', '\\"'), text, flags=re.DOTALL)
        value = _expanded(text, variables)
        return "" if text[0] == "#" else shlex.quote(value) if text[0] == "$" and "$" in value else value

    return _PART.sub(part, text)


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Value of an expansion. What only a shell knows stays as it is; the environment is read by ${oc.env:NAME}."""
    if text.startswith("$(("):
        numbers = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[1]), text[3:-2])
        return str(evaluate(numbers.replace("/", "//"))) if re.fullmatch(r"[\d\s+*/%()-]+", numbers) else text
    if text in ("$@", "$*") or text.endswith("[@]}"):
        return ""
    if (match := _VARIABLE.fullmatch(text)) is None:
        return text
    name, default = match.groups()
    default = f"${{oc.env:{name}}}" if default is None else _filled(default.removesuffix("}"), variables).strip("\"'")
    return variables.get(name, default)
