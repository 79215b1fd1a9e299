from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from roll_lite.config.problems import NO_VALUE, Path, Problem, dotted, show, space_missing
from roll_lite.files import first_line


class _Loader(yaml.SafeLoader):
    """YAML 1.1 loader that reads 1e-6 as a number and 2026-08-01 as a text."""


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
    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Key paths of unreadable values; the root path if the text is not YAML."""


def parse_yaml(text: str, place: str, root: Path = ()) -> YamlSource:
    """Parse YAML. `place`: name of the text in messages. `root`: configuration path of its top level."""
    source = YamlSource()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        source.data = _convert(loader, node, root, place, source) if node is not None else None
    except (yaml.YAMLError, RecursionError) as error:
        message = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).replace("\n", " ")
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            what = "'?'" if "got '?'" in str(error.problem) else "braces"  # in braces, YAML allows hf://a/b?split=train in quotes only
            hint = f"; put a text with {what} in quotes" if "{" in (mark.get_snippet() or "") else ""
            message = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{hint}"
        source = YamlSource(problems=[Problem(place, f"not valid YAML: {message}")], broken={root})
    return source


def _convert(loader: _Loader, node: yaml.Node, path: Path, place: str, source: YamlSource) -> Any:
    source.lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_convert(loader, item, (*path, str(index)), place, source) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
        return _scalar(loader, node, path, place, source)
    own_keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"]
    for key in sorted({key for key in own_keys if own_keys.count(key) > 1}):
        line = max(one.start_mark.line for one, _ in node.value if one.value == key) + 1
        source.problems.append(Problem(dotted((*path, key)), "written twice; keep one", source=f"{place}:{line}"))
    for key_node, value_node in node.value if node.flow_style else ():
        if key_node.end_mark.index == value_node.end_mark.index:  # no colon was read: `{lr:1e-4}`, `{prompt}`
            text = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            message = space_missing(text).removeprefix("; ") or "YAML takes this for a section; put a text with braces in quotes"
            _refuse(source, path, message, NO_VALUE, f"{place}:{source.lines[path]}")
            return None
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            message = f"a key has to be text, {show(key) if key is not None else 'this'} is not; put it in quotes"
            source.problems.append(Problem(dotted(path) or "(top)", message, source=f"{place}:{key_node.start_mark.line + 1}"))
            continue
        result[key] = _convert(loader, value_node, (*path, key), place, source)
        source.lines[(*path, key)] = key_node.start_mark.line + 1
    return result


def _scalar(loader: _Loader, node: yaml.Node, path: Path, place: str, source: YamlSource) -> Any:
    value, message = None, ""
    try:
        value = loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, KeyError, ArithmeticError, AttributeError):  # the constructors do not validate
        message = f"{show(node.value)} cannot be read as {node.tag.rpartition(':')[2]}; for text, put it in quotes"
    if not isinstance(value, str | int | float | None):
        value, message = None, "only text, numbers, true, false and null can be values here"
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"probe": value})
        except (GrammarParseError, RecursionError) as error:
            message = f"not a valid interpolation: {first_line(error)}"
    if not message:
        return value
    _refuse(source, path, message, value if isinstance(value, str) else NO_VALUE, f"{place}:{node.start_mark.line + 1}")
    return None


def _refuse(source: YamlSource, path: Path, message: str, value: Any, where: str) -> None:
    source.problems.append(Problem(dotted(path), message, value, where))
    source.broken.add(path)
