"""Configuration files to one tree: `defaults:` lists, groups, packages and overrides as Hydra users know them, merged by OmegaConf.

Hydra itself stops at the first mistake, and refuses keys that the schema has but the file has not; here all mistakes are collected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll_lite.config.overrides import Override, apply_override, parse_override
from roll_lite.config.problems import Path, Problem, did_you_mean, dotted, first_line
from roll_lite.config.shipped import CONFIGS
from roll_lite.config.short_form import spell_out
from roll_lite.config.yaml_source import parse_yaml

_PACKAGE_HEADER = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_ENTRY = re.compile(r"(?:(?P<keyword>optional|override)\s+)?(?P<group>[^@\s]+)(?:@(?P<package>\S+))?")


@dataclass(frozen=True)
class Composed:
    """The merged and resolved tree. Values that could not be resolved are left out of it and listed in `broken`."""

    data: dict[str, Any]
    problems: list[Problem]
    broken: frozenset[Path]
    origins: dict[Path, str]
    """Where each path was written last."""


@dataclass(frozen=True)
class _Entry:
    """One line of a defaults list."""

    group: str
    option: str
    package: str | None
    """Where its content goes; None leaves that to the file's own header, then to its group."""
    optional: bool
    place: str


@dataclass
class _Composer:
    folder: FilePath
    choices: dict[str, str | None] = field(default_factory=dict)
    """Options chosen for groups from outside the file that selects them."""
    used: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    origins: dict[Path, str] = field(default_factory=dict)
    layers: list[DictConfig] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)

    def find(self, name: str) -> FilePath:
        return find_config(name, self.folder)

    def add_file(self, name: str, package: str, stack: tuple[str, ...]) -> None:
        """Append the layers of a file, its defaults in their order; by default the file itself comes last and so wins."""
        path = self.find(name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(Problem(str(path), f"cannot be read: {error}"))
            return
        header = _PACKAGE_HEADER.search(text)
        group = name.rpartition("/")[0]
        if header is not None:
            package = _package_of(header.group(1), group)
        root = tuple(package.split(".")) if package else ()
        source = parse_yaml(text, path.name if not group else name + ".yaml", root)
        self.problems += source.problems
        self.broken |= source.broken
        if source.data is not None and not isinstance(source.data, dict):
            self.problems.append(Problem(str(path), "has to hold a mapping of keys to values at the top"))
            return
        data = spell_out(source.data or {}, root, source.lines)
        defaults = data.pop("defaults", [])
        label = f"{name}.yaml"
        for entry in self._entries(defaults, group, f"{label}: defaults"):
            if entry is not None:
                self._add_entry(entry, package, (*stack, name))
                continue
            self.origins.update({where: f"{label}:{line}" for where, line in source.lines.items() if len(where) > len(root)})
            for key in reversed(root):
                data = {key: data}
            self.layers.append(OmegaConf.create(data))

    def _entries(self, defaults: Any, group: str, place: str) -> list[_Entry | None]:
        """None stands for `_self_`. Entries that override another file's choice are noted before anything is loaded."""
        if not isinstance(defaults, list):
            self.problems.append(Problem(place, "has to be a list of file names and `group: option` entries", defaults))
            return [None]
        entries: list[_Entry | None] = []
        for index, item in enumerate(defaults):
            where = f"{place}[{index}]"
            if item == "_self_":
                entries.append(None)
            elif isinstance(item, str):
                name, _, package = item.partition("@")
                own_group, _, option = _absolute(name, group).rpartition("/")
                entries.append(_Entry(own_group, option, package or None, False, where))
            elif isinstance(item, dict) and len(item) == 1:
                entries += self._group_entries(*next(iter(item.items())), group, where)
            else:
                self.problems.append(Problem(where, "write a file's name, `group: option` or _self_", item))
        if entries.count(None) > 1:
            self.problems.append(Problem(place, "_self_ is listed twice; keep one"))
        return entries if None in entries else [*entries, None]

    def _group_entries(self, key: str, option: Any, group: str, where: str) -> list[_Entry | None]:
        match = _ENTRY.fullmatch(key)
        options = option if isinstance(option, list) else [option]
        if match is None or not all(isinstance(one, str | None) for one in options):
            self.problems.append(
                Problem(where, "write `group: option`, `optional group: option` or `group@package: option`", {key: option})
            )
            return []
        name = _absolute(match["group"], group)
        if match["keyword"] == "override":
            self.choices.setdefault(name, option)
            return []
        if name in self.choices:
            self.used.add(name)
            options = [self.choices[name]]
        optional = match["keyword"] == "optional"
        return [_Entry(name, one, match["package"], optional, where) for one in options if one is not None]

    def _add_entry(self, entry: _Entry, parent_package: str, stack: tuple[str, ...]) -> None:
        name = f"{entry.group}/{entry.option}" if entry.group else entry.option
        name = name.removesuffix(".yaml")
        if name in stack:
            self.problems.append(Problem(entry.place, f"loads itself: {' -> '.join([*stack, name])}"))
        elif ".." in name.split("/"):
            message = "names are looked up in the configuration folder, then among the shipped ones; write the name without a path"
            self.problems.append(Problem(entry.place, message, name))
        elif self.find(name).is_file():
            self.add_file(name, _package_below(parent_package, stack[-1].rpartition("/")[0], entry), stack)
        elif not entry.optional:
            group_folder = self.folder / entry.group
            near = suggestion(entry.option, group_folder, CONFIGS / entry.group)
            self.problems.append(Problem(entry.place, f"no file {group_folder / entry.option}.yaml; {near}", entry.option))


def find_config(name: str, folder: FilePath) -> FilePath:
    """In the configuration folder, else among the shipped ones, so that a folder of one's own can build on them."""
    own, shipped = folder / f"{name}.yaml", CONFIGS / f"{name}.yaml"
    return own if own.is_file() or not shipped.is_file() else shipped


def suggestion(name: str, folder: FilePath, shipped: FilePath = CONFIGS) -> str:
    """What was meant, of either folder; where nothing comes near, what there is in one's own."""
    own = {path.stem for path in folder.glob("*.yaml")}
    every = own | {path.stem for path in shipped.glob("*.yaml")}
    return did_you_mean(name, every if get_close_matches(name, every) or not own else own)


def compose(name: str, folder: FilePath, overrides: Sequence[str]) -> Composed:
    """Merge the named file, its defaults and the overrides, and resolve `${...}`."""
    composer = _Composer(folder)
    parsed = [parse_override(text) for text in overrides]
    composer.problems += [one for one in parsed if isinstance(one, Problem)]
    valid = [one for one in parsed if isinstance(one, Override)]
    choices = {"/".join(one.path): one for one in valid if _selects_group(one, folder)}
    composer.choices.update({group: one.value for group, one in choices.items()})
    composer.add_file(name, "", ())
    for group, choice in choices.items():
        if group in composer.used:
            continue
        if choice.add and choice.value is not None:
            composer._add_entry(_Entry(group, choice.value, None, False, choice.text), "", (name,))
        else:
            message = f"no defaults list selects an option of {group!r}; add one with +{choice.text.lstrip('+')}"
            composer.problems.append(Problem(choice.text, message, source="command line"))
    config = _merge(composer)
    for override in valid:
        if "/".join(override.path) not in choices:
            composer.problems += apply_override(config, override)
            composer.origins = {path: origin for path, origin in composer.origins.items() if path[: len(override.path)] != override.path}
            composer.origins |= {
                override.path[:depth]: "command line"
                for depth in range(1, len(override.path) + 1)
                if depth == len(override.path) or override.path[:depth] not in composer.origins
            }
    data = _resolve(config, (), composer)
    return Composed(data, composer.problems, frozenset(composer.broken), composer.origins)


def _selects_group(override: Override, folder: FilePath) -> bool:
    """`group=option` picks a file where the configuration folder has a folder of that name, as in Hydra."""
    is_choice = not override.delete and len(override.path) == 1 and isinstance(override.value, str | None)
    return is_choice and (folder / override.path[0]).is_dir()


def _merge(composer: _Composer) -> DictConfig:
    merged = OmegaConf.create({})
    for layer in composer.layers:
        _drop_other_kinds(merged, layer)
        try:
            merged = OmegaConf.merge(merged, layer)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            composer.problems.append(Problem(str(error.full_key or "(merging)"), first_line(error)))
    assert isinstance(merged, DictConfig)
    return merged


def _drop_other_kinds(base: DictConfig, layer: DictConfig) -> None:
    """A list over a section, or the other way round, replaces it; OmegaConf would refuse the whole file."""
    for key in map(str, layer):
        if key not in base or OmegaConf.is_interpolation(base, key) or OmegaConf.is_interpolation(layer, key) or key not in layer:
            continue
        old, new = base[key], layer[key]
        if isinstance(old, DictConfig) and isinstance(new, DictConfig):
            _drop_other_kinds(old, new)
        elif isinstance(old, DictConfig | ListConfig) and isinstance(new, DictConfig | ListConfig) and type(old) is not type(new):
            del base[key]


def _resolve(node: DictConfig | ListConfig, path: Path, composer: _Composer) -> Any:
    """Plain data with every interpolation replaced; one that cannot be is a problem, and its path is broken."""
    keys: list[Any] = list(range(len(node))) if isinstance(node, ListConfig) else list(node.keys())
    result: dict[str, Any] = {}
    for key in keys:
        result[str(key)] = None
        here = (*path, str(key))
        if OmegaConf.is_missing(node, key):
            composer.problems.append(Problem(dotted(here), f"has to be given, for example on the command line: {dotted(here)}=..."))
            composer.broken.add(here)
            continue
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            raw = OmegaConf.to_container(node, resolve=False)
            composer.problems.append(Problem(dotted(here), first_line(error), raw[key]))  # type: ignore[index]
            composer.broken.add(here)
            continue
        result[str(key)] = _resolve(value, here, composer) if isinstance(value, DictConfig | ListConfig) else value
    if isinstance(node, ListConfig):
        return list(result.values())
    return {key: value for key, value in result.items() if (*path, key) not in composer.broken}


def _package_of(text: str, group: str) -> str:
    return {"_global_": "", "_group_": group.replace("/", ".")}.get(text, text)


def _package_below(parent_package: str, parent_group: str, entry: _Entry) -> str:
    """An explicit package and a group below the parent's own follow the parent to where it was put."""
    if entry.package is not None:
        own = _package_of(entry.package, entry.group)
        return own if entry.package == "_global_" else ".".join(part for part in (parent_package, own) if part)
    if f"{entry.group}/".startswith(f"{parent_group}/") or not parent_group:
        below = entry.group.removeprefix(parent_group).strip("/").replace("/", ".")
        return ".".join(part for part in (parent_package, below) if part)
    return entry.group.replace("/", ".")


def _absolute(name: str, group: str) -> str:
    """Names are relative to the file's own group; a leading slash starts at the configuration folder."""
    if name.startswith("/") or not group:
        return name.lstrip("/")
    return f"{group}/{name}"
