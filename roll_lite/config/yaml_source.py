"""YAML text to plain data, remembering the line of every value and collecting mistakes instead of stopping at the first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from roll_lite.config.problems import NO_VALUE, Path, Problem, dotted, first_line, show


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-6 as text and 2026-08-01 as a date. Here the first is a number and the second text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


@dataclass
class YamlSource:
    """One parsed text: its data, the line of each path, and what is wrong with it."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Paths whose value could not be read and is null in `data`."""


def parse_yaml(text: str, place: str, root: Path = ()) -> YamlSource:
    """`place` names the text in messages; `root` is where its data will stand in the tree."""
    source = YamlSource()
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        source.data = _convert(loader, node, root, place, source) if node is not None else None
    except yaml.YAMLError as error:
        source.problems.append(Problem(place, f"not valid YAML: {_one_line(error)}"))
    finally:
        loader.dispose()
    return source


def _convert(loader: _Loader, node: yaml.Node, path: Path, place: str, source: YamlSource) -> Any:
    source.lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_convert(loader, item, (*path, str(index)), place, source) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader.construct_object(node), node, path, place, source)
    own_keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"]
    for key in sorted({key for key in own_keys if own_keys.count(key) > 1}):
        source.problems.append(Problem(dotted((*path, key)), "written twice; keep one", source=f"{place}:{node.start_mark.line + 1}"))
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            message = f"a key has to be text, {show(key)} is not; put it in quotes"
            source.problems.append(Problem(dotted(path) or "(top)", message, source=f"{place}:{key_node.start_mark.line + 1}"))
            continue
        result[key] = _convert(loader, value_node, (*path, key), place, source)
        source.lines[(*path, key)] = key_node.start_mark.line + 1
    return result


def _scalar(value: Any, node: yaml.Node, path: Path, place: str, source: YamlSource) -> Any:
    """The value, if it is plain and its `${...}`, where it has any, can be parsed."""
    message = "" if isinstance(value, str | int | float | None) else "only text, numbers, true, false and null can be values here"
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"probe": value})
        except GrammarParseError as error:
            message = f"not a valid interpolation: {first_line(error)}"
    if not message:
        return value
    shown = value if isinstance(value, str) else NO_VALUE
    source.problems.append(Problem(dotted(path), message, shown, f"{place}:{node.start_mark.line + 1}"))
    source.broken.add(path)
    return None


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return str(error).replace("\n", " ")
