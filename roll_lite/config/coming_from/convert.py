"""Converts another trainer's settings to a configuration, by that trainer's table: a YAML file beside this module."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from roll_lite.config.coming_from.settings import EXPANSION, FAILED, Given, evaluate, from_script, from_yaml
from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.problems import LEFT_OUT, Problem, or_nearest
from roll_lite.config.validation import validate

PROJECTS = ("roll", "verl", "openrlhf")
OUTCOMES = ("to", "always", "none")
_ONLY_THERE = re.compile(rf"(?!\$\{{oc\.env:)(?:{EXPANSION})", re.DOTALL)


@cache
def table_of(project: str) -> dict[str, Any]:
    """Table of a project; the head of verl.yaml explains its form."""
    table: dict[str, Any] = parse_yaml(Path(__file__).with_name(f"{project}.yaml").read_text(encoding="utf-8"), project).data
    keys: dict[str, dict[str, Any]] = {key: {"to": entry} if isinstance(entry, str) else entry for key, entry in table["keys"].items()}
    keys |= {former: {**entry, "now": key} for key, entry in keys.items() for former in entry.get("was", ())}
    for key, entry in keys.items():
        if isinstance(entry.get("to"), str):
            entry["to"] = {entry["to"]: entry.get("value", "value")}
        entry["pattern"] = re.compile(re.escape(key).replace(r"\{name\}", "([^.]+)").replace(r"\*", ".+"))
    table["keys"] = dict(sorted(keys.items(), key=lambda one: -len(one[0])))
    return table


class Conversion:
    """Result of an import: `config`; `told`, settings without counterpart and notes; `outcomes` of the settings."""

    def __init__(self, project: str, text: str, file: str) -> None:
        table = table_of(project)
        self.config: dict[str, Any] = {}
        self.told: list[Problem] = []
        self.outcomes: list[str] = []
        self._file, self._sources = file, dict[str, Given]()
        self._keys = table["keys"]
        given = from_yaml(text, file) if file.endswith((".yaml", ".yml")) else from_script(text, file, lambda key: self._entry(key)[0])
        found = [(one, *self._entry(one.key)) for one in given]
        written = {entry.get("now", one.key): one.value for one, entry, _ in found}
        self._names = dict.fromkeys(name for *_, name in found if name) or ["main"]
        self._scope: dict[str, Any] = {"at": (table["defaults"] | written).get, "devices": devices}
        for name, expression in table["let"].items():
            self._scope[name] = evaluate(expression, **self._scope)
        for key in table["defaults"]:
            if key not in written:
                self._convert(Given(key, table["defaults"][key], 0), *self._entry(key))
        for row in found:
            self._convert(*row)
        for problem in validate(self.config)[1]:
            if (source := self._sources.get(problem.path)) and source.line:
                self._put(problem.path, LEFT_OUT, source)
                self._tell(source, f"{problem.path}: {problem.message}")
        _drop_defaults(self.config, self.config)

    def as_yaml(self) -> str:
        without_anchors = json.loads(json.dumps(self.config))
        return yaml.safe_dump(without_anchors, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)

    def summary(self) -> str:
        numbers = [self.outcomes.count(one) for one in (*OUTCOMES, "unknown")]
        return "{}: {} settings: {} converted, {} need nothing, {} have no counterpart, {} are unknown".format(
            self._file, sum(numbers), *numbers
        )

    def _entry(self, key: str) -> tuple[dict[str, Any], str]:
        """Entry of a key, the longest if several fit, and the name in the place of `{name}`; nothing for an unknown key."""
        for entry in self._keys.values():
            if match := entry["pattern"].fullmatch(key):
                return entry, "".join(match.groups())
        return {}, ""

    def _convert(self, given: Given, entry: dict[str, Any], name: str) -> None:
        outcome = next((one for one in OUTCOMES if one in entry), "unknown")
        message = entry.get("note" if outcome == "to" else outcome, "")
        if not entry:
            message = f"is not known here{or_nearest(given.key, self._keys)}"
        elif outcome == "to" and "when" in entry and not evaluate(entry["when"], value=given.value, **self._scope):
            outcome, message = "always", entry.get("else", "")
        elif outcome == "to" and (failure := self._write(given, entry, name)):
            outcome, message = "none", failure
        if given.line:
            self.outcomes.append(outcome)
            self._tell(given, message)

    def _tell(self, given: Given, message: str) -> None:
        if message:
            self.told.append(Problem(given.key, message, given.value, f"{self._file}:{given.line}"))

    def _write(self, given: Given, entry: dict[str, Any], name: str) -> str:
        """Set the counterparts of a setting; returns what prevents it, or nothing."""
        value, words, failure = given.value, entry.get("words"), ""
        if value is None:
            return ""
        if _ONLY_THERE.search(str(value)):
            return f"holds a part that is known there only; set {', '.join(entry['to'])}"
        if words:
            value = words.get(str(value).rpartition(".")[2].lower(), FAILED)
        for path, expression in entry["to"].items():
            converted = FAILED if value is FAILED else evaluate(expression, value=value, name=name, **self._scope)
            if converted is FAILED:
                failure = f"has no counterpart; {path} may be {', '.join(words.values())}" if words else f"does not fit {path}; set that"
            for each in self._names if converted not in (None, FAILED) else ():
                self._put(path.replace("{name}", name).replace("{each}", each), converted, given)
        return failure

    def _put(self, path: str, value: Any, source: Given) -> None:
        section = self.config
        *above, last = path.split(".")
        for key in above:
            section = section.setdefault(key, {})
        section[last], self._sources[path] = value, source


def _drop_defaults(section: dict[str, Any], config: dict[str, Any]) -> None:
    """Drop what the configuration means without it. Device counts stay: some presets treat an explicit default differently."""
    whole = validate(config)[0].model_dump(warnings=False)
    for key, value in list(section.items()):
        if isinstance(value, dict):
            _drop_defaults(value, config)
        del section[key]
        if key == "devices" or value == LEFT_OUT or not section or validate(config)[0].model_dump(warnings=False) != whole:
            section[key] = value


def devices(value: Any) -> Any:
    """Device numbers of ROLL's `device_mapping`, a list or a text such as `list(range(0, 8))`."""
    return evaluate(value, list=list) if isinstance(value, str) else value
