from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path as FilePath
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment

from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.problems import ConfigError, Path, Problem, dotted, or_nearest
from roll_lite.config.validation import validate

FAILED = object()
_EXPANSION = re.compile(
    r"""\$\(\((?P<sum>.*?)\)\)(?!\))|\$\((?:[^()]|\([^()]*\))*\)
    |\$(?:\{(?=\w+[:}-]))?(?P<name>[A-Za-z_]\w*|\d(?=:?-))(?::?-(?P<default>(?:[^{}]|\{[^{}]*\})*))?(?(default)\}|\}?)|\$\{[^}]*\}|\$[@*#]""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(?P<open>\(?)(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"--([\w.-]+)|(?:--|\+{0,2})([\w@/.-]+)=(.*)", re.DOTALL)
_END = re.compile(r"[|&;]+|\d?[<>].*")
_BEFORE_ASSIGNMENT = re.compile(r"export|local|readonly|declare|-a|then|do|else")
_UNKNOWN = re.compile(r"\$(?!\{oc\.env:)")
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")


def table_of(project: str) -> dict[str, Any]:
    table: dict[str, Any] = parse_yaml(FilePath(__file__).with_name(f"{project}.yaml").read_text(encoding="utf-8"), project).data
    keys: dict[str, Any] = {key: {"to": entry} if isinstance(entry, str) else entry for key, entry in table["keys"].items()}
    for key, entry in keys.items():
        spellings = "|".join(map(re.escape, (key, *entry.get("was", ()))))
        entry["pattern"] = re.compile(spellings.replace(r"\{name\}", "([^.]+)").replace(r"\*", ".+"))
        entry["key"] = key
    table["keys"] = {key: keys[key] for key in sorted(keys, key=len, reverse=True)}
    return table


class Conversion:
    """Conversion of another trainer's settings to a roll_lite configuration, `config`. `told`: notes, and messages about settings without
    counterpart."""

    def __init__(self, project: str, text: str, file: str) -> None:
        table = table_of(project)
        self.config: dict[str, Any] = {}
        self.told: list[Problem] = []
        self._file, self._keys, self._sources = file, table["keys"], dict[str, Setting]()
        is_yaml = file.endswith((".yaml", ".yml"))
        settings = _from_yaml(text, file) if is_yaml else _from_script(text, lambda key: "pattern" in self.entry(key)[0])
        if not settings:
            raise ConfigError(file, [Problem(file, f"has no settings of {project}; name its YAML file, or the script that starts it")])
        found = [(one, *self.entry(one.key)) for one in settings]
        written = {entry["key"] if "was" in entry else one.key: one.value for one, entry, _ in found}
        self._names = dict.fromkeys(name for *_, name in found if name) or ["main"]
        self._scope = {
            "at": (table["defaults"] | written).get,
            "devices": lambda text: evaluate(text, list=list) if isinstance(text, str) else text,
        }
        for name, expression in table["let"].items():
            self._scope[name] = evaluate(expression, **self._scope)
        defaults = [(Setting(key, value, 0), *self.entry(key)) for key, value in table["defaults"].items() if key not in written]
        for setting, entry, name in defaults + found:
            message = entry.get("always") or entry.get("none")
            if "to" in entry and evaluate(entry.get("when", "true"), value=setting.value, **self._scope):
                message = self._write(setting, entry, name) or entry.get("note")
            elif "to" in entry:
                message = entry.get("else")
            self._tell(setting, message)
        for problem in validate(self.config)[1]:
            if source := self._sources.get(problem.path):
                self._tell(source, f"{problem.path}: {problem.message}")
        _drop_defaults(self.config, self.config)

    def entry(self, key: str) -> tuple[dict[str, Any], str]:
        """Return (table entry, text matched by `{name}`). The longest matching pattern wins; an unknown setting gets an error entry."""
        for entry in self._keys.values():
            if match := entry["pattern"].fullmatch(key):
                return entry, "".join(match.groups())
        return {"none": f"is not known here{or_nearest(key, self._keys)}"}, ""

    def _tell(self, setting: Setting, message: str | None) -> None:
        if setting.line and message:
            self.told.append(Problem(setting.key, message, setting.value, f"{self._file}:{setting.line}"))

    def _write(self, setting: Setting, entry: dict[str, Any], name: str) -> str:
        """Convert a setting. Return an error message or ""."""
        value, words, targets, failure = setting.value, entry.get("words"), entry["to"], ""
        if isinstance(targets, str):
            targets = {targets: entry.get("value", "value")}
        unknown = f"holds a part that is known there only; set {', '.join(targets)}"
        if _UNKNOWN.search(str(value)) and "partly" not in entry:
            return unknown
        if words and value is not None:
            value = words.get(str(value).rpartition(".")[2].lower(), FAILED)
        for path, expression in targets.items() if value is not None else ():
            converted = evaluate(expression, value=value, name=name, **self._scope)
            if _UNKNOWN.search(str(converted)):
                converted, failure = None, unknown
            elif converted is FAILED:
                failure = f"has no counterpart; {path} may be {', '.join(words.values())}" if words else f"does not fit {path}; set that"
            for each in self._names if converted not in (None, FAILED) else ():
                full = path.replace("{name}", name).replace("{each}", each)
                *above, last = full.split(".")
                section = self.config
                for key in above:
                    section = section.setdefault(key, {})
                section[last], self._sources[full] = deepcopy(converted), setting
        return failure


def _meaning(config: dict[str, Any]) -> object:
    valid, problems = validate(config)
    return valid.model_dump(warnings=False), problems


def _drop_defaults(section: dict[str, Any], config: dict[str, Any]) -> None:
    """Drop settings equal to their defaults from `section` of `config`. `devices` stays: placement presets treat a given number unlike an
    omitted one."""
    whole = _meaning(config)
    for key, value in list(section.items()):
        if isinstance(value, dict):
            _drop_defaults(value, config)
        del section[key]
        if key == "devices" or not section or _meaning(config) != whole:
            section[key] = value


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Setting:
    key: str
    value: Any
    line: int


def evaluate(expression: str, **names: Any) -> Any:
    """Evaluate a Jinja expression; undefined names are None. FAILED on an error."""
    try:
        return SandboxedEnvironment().compile_expression(expression)(**names)
    except (TypeError, ArithmeticError, TemplateError):
        return FAILED


def _from_yaml(text: str, file: str) -> list[Setting]:
    source = parse_yaml(text, file)
    if source.problems:
        raise ConfigError(file, source.problems)

    def leaves(value: Any, path: Path) -> Iterator[Setting]:
        if value and isinstance(value, dict):
            for key, inner in value.items():
                yield from leaves(inner, (*path, key))
        else:
            yield Setting(dotted(path), value, source.lines[path])

    settings = [*leaves(source.data, ())] if isinstance(source.data, dict) else []
    known = {one.key: one.value for one in settings}
    return [
        replace(one, value=_value(_INTERPOLATION.sub(lambda name: str(known.get(name[1], name[2] or name[0])), one.value)))
        if isinstance(one.value, str)
        else one
        for one in settings
    ]


def _from_script(text: str, is_known: Callable[[str], object]) -> list[Setting]:
    """Arguments in a shell script, except those of commands and arrays without any known argument."""
    found: list[Setting] = []
    for command in _commands(text):
        start = len(found)
        for word, line in command:
            word = word if "(" in word else word.removesuffix(")")
            if word in ("--", "-m"):
                del found[start:]
            elif match := _ARGUMENT.fullmatch(word):
                found.append(Setting(match[1] or match[2], [] if match[1] else [_value(match[3])], line))
            elif found[start:] and word:
                found[-1].value.append(_value(word))
        if not any(is_known(one.key) for one in found[start:]):
            del found[start:]
    return [replace(one, value=one.value[0] if len(one.value) == 1 else one.value or True) for one in found]


def _value(text: str) -> Any:
    source = parse_yaml(text, "")
    if re.fullmatch(r"[\d.]+_[\d.]+", text):  # two numbers, of which YAML makes one
        return text
    if source.problems or (isinstance(source.data, dict) and text[0] != "{"):
        return text
    return None if text == "None" else source.data


@dataclass
class _Branches:
    """An `if` or `case`. `reads`: whether to read the current branch. `over`: a branch that surely runs was met."""

    subject: str = ""
    """Value that a `case` compares with its branches' patterns; empty for an `if`."""
    reads: bool = True
    over: bool = False
    awaits_pattern: bool = False

    def enter(self, holds: bool | None) -> None:
        self.reads = not self.over and holds is not False
        self.over |= holds is True


class _Conditions:
    """Conditions of a shell script around the current word."""

    def __init__(self) -> None:
        self._open: list[_Branches] = []
        self._test: list[str] | None = None
        """Words so far of the condition after `if`."""

    @property
    def reads(self) -> bool:
        return all(one.reads for one in self._open)

    def take(self, words: list[str], has_then: bool) -> int:
        """Return how many of the first words belong to conditions, not to commands. `has_then`: `then` may follow an `if`."""
        word = words[0]
        if self._test is not None:
            if word == "then":
                self._open[-1].enter(_holds(self._test))
                self._test = None
            else:
                self._test.append(word)
        elif word in ("if", "elif") and has_then:
            self._test = []
            if word == "if" or not self._open:
                self._open.append(_Branches())
        elif word == "case" and words[2:3] == ["in"]:
            self._open.append(_Branches(words[1], awaits_pattern=True))
            return 3
        elif not self._open:
            return 0
        elif word in ("fi", "esac"):
            self._open.pop()
        elif word == "else":
            self._open[-1].enter(True)
        elif self._open[-1].awaits_pattern:
            end = next((at for at, one in enumerate(words, 1) if one.endswith(")")), 1)
            self._open[-1].awaits_pattern = False
            self._open[-1].enter(_matches(self._open[-1].subject, "".join(words[:end]).strip("()")))
            return end
        else:
            return 0
        return 1

    def end_branch(self) -> None:
        if self._open:
            self._open[-1].awaits_pattern = True


def _matches(subject: str, patterns: str) -> bool | None:
    """Compare the subject of a `case` with the patterns of a branch; None if unknown."""
    if "$" in subject:
        return False if patterns == "npu" else None
    return any(fnmatchcase(subject, one) for one in patterns.split("|"))


def _holds(words: list[str]) -> bool | None:
    """Evaluate a shell condition; None if unknown. A value that only the shell knows counts as different from `npu`."""
    for joint, decides in (("||", True), ("&&", False)):
        if joint in words:
            at = words.index(joint)
            parts = (_holds(words[:at]), _holds(words[at + 1 :]))
            return decides if decides in parts else None if None in parts else not decides
    match [one for one in words if one not in ("[", "]", "[[", "]]", ";")]:
        case ["!", *rest]:
            value = _holds(rest)
            return None if value is None else not value
        case ["-n" | "-z" as sign, text] if "$" not in text:
            return (text == "") == (sign == "-z")
        case [left, "=" | "==" | "!=" as sign, right] if "$" not in left + right or right == "npu":
            return (left == right) == (sign != "!=")
        case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as sign, right] if left.isdecimal() and right.isdecimal():
            return bool(getattr(operator, sign[1:])(int(left), int(right)))
    return None


def _commands(text: str) -> Iterator[list[tuple[str, int]]]:
    """Split a shell script into commands and arrays: lists of (word, line number). Branches whose condition does not hold are left out; if
    only the shell knows, all branches are read except those for `npu`, which is other hardware."""
    variables: dict[str, str] = {}
    command: list[tuple[str, int]] = []
    conditions = _Conditions()
    before, is_array, runs, status = "", False, True, None
    lines = [line.rstrip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        goes_on = line.endswith("\\") or bool(command and line.lstrip().startswith("#"))
        before += line.removesuffix("\\")
        try:
            lexer = shlex.shlex(_filled(before, variables), posix=True, punctuation_chars=";")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # the quotation ends in a later line
            before += "" if goes_on else "\n"
            continue
        joins = words[-1:] in (["&&"], ["||"])
        has_then = goes_on or joins or "then" in (*words, next((one.strip() for one in lines[number:] if one), ""))
        before = ""
        while words:
            if not command and (taken := conditions.take(words, has_then)):
                words = words[taken:]
                continue
            word, *words = words
            is_read = runs and conditions.reads
            match = None if command else _ASSIGNMENT.fullmatch(word)
            is_array |= bool(match and match["open"])
            if match and not is_array:
                if is_read:
                    variables[match[1]] = variables.get(match[1], "") * len(match[2]) + match[4]
                status = True if runs else status
            elif _END.fullmatch(word):
                if is_read:
                    yield command
                if command and runs:
                    status = _holds([one for one, _ in command]) if command[0][0] in ("[", "[[") else None
                command, is_array = [], False
                runs = status is None or {"&&": status, "||": not status}.get(word, True)
                if word == ";;":
                    conditions.end_branch()
            elif command and command[-1][0] == "-c" and is_read:
                yield from ([(one, number) for one, _ in inner] for inner in _commands(word))
            elif command or not _BEFORE_ASSIGNMENT.fullmatch(word):
                command.append((match[4] if match else word, number))
        if not goes_on and not joins and (not is_array or line.endswith(")")):
            if runs and conditions.reads:
                yield command
            command, is_array, runs, status = [], False, True, None
    yield command


def _filled(text: str, variables: dict[str, str]) -> str:
    """Expand variables and $((...)) in shell text. A variable that the script does not set becomes its default or ${oc.env:NAME}."""

    def value(match: re.Match[str]) -> str:
        total, name, default = match.groups()
        if name is not None:
            if default is None:
                return variables.get(name, f"${{oc.env:{name}}}")
            return variables.get(name) or _filled(default, variables).strip("\"'")
        numbers = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda one: variables.get(one[1], one[1]), total or "")
        if re.fullmatch(r"[\d\s+*/%()-]+", numbers):
            return str(evaluate(numbers.replace("/", "//")))
        return "" if "@" in match[0] else "$(...)"

    return _EXPANSION.sub(value, text)
