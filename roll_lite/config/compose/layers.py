"""Merge configuration files and overrides like Hydra, but collect all mistakes and accept keys that no file sets."""

from __future__ import annotations

import copy
import os
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from roll_lite.config.compose.merging import merge, spell_out
from roll_lite.config.compose.overrides import Override, apply_override, names_first, parse_override
from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.presets import preset, validation_preset
from roll_lite.config.problems import LEFT_OUT, NO_VALUE, Missing, Path, Problem, close_names, did_you_mean, dotted
from roll_lite.config.validation import words_at
from roll_lite.files import CONFIGS, first_line, is_file, read_text

DEEPEST = 50


@dataclass
class Composition:
    folder: FilePath
    may_be_left_out: bool = False
    layers: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Paths of missing, unreadable or unresolvable values; root () for a bad file or `defaults`."""
    origins: dict[Path, str] = field(default_factory=dict)
    secrets: dict[Path, tuple[str, Any]] = field(default_factory=dict)
    """{key path: (text in the file, value)} of values that contain environment variables."""
    replaced_files: list[str] = field(default_factory=list)

    def add_file(self, path: FilePath, name: str, stack: tuple[FilePath, ...]) -> None:
        """Append a YAML file and the files in its `defaults` to `layers`, in the order of `defaults`. `_self_` there stands for the file,
        which otherwise comes last. `stack`: files that include this one, to detect cycles."""
        label = f"{name}.yaml"
        try:
            text = read_text(path)
        except ValueError as error:
            self.refuse(label, str(error))
            return
        source = parse_yaml(text, label)
        self.problems += source.problems
        self.broken |= source.broken
        if source.data is not None and not isinstance(source.data, dict):
            self.refuse(label, "has to hold a mapping of keys to values at the top")
            return
        data = spell_out(source.data or {}, (), source.lines)
        for entry, where in self._entries(data.pop("defaults", []), f"{label}: defaults"):
            if entry is not None:
                self._add_entry(entry, where, (*stack, path.resolve()))
                continue
            self.origins.update({place: f"{label}:{line}" for place, line in source.lines.items() if place})
            self.layers.append(data)

    def found(self, name: str, folder: FilePath) -> FilePath | None:
        path = find(name, folder)
        shipped = CONFIGS / f"{name}.yaml"
        if path is not None and is_file(shipped) and not path.samefile(shipped):
            self.replaced_files.append(f"{path} is used; the shipped configuration {name} has the same name")
        return path

    def refuse(self, place: str, message: str, value: Any = NO_VALUE, broken: Path = ()) -> None:
        self.problems.append(Problem(place, message, value))
        self.broken.add(broken)

    def _entries(self, defaults: Any, place: str) -> list[tuple[str | None, str]]:
        """Return (file name, location for error messages) for each entry of `defaults`; the name is None for `_self_`."""
        items = [defaults] if isinstance(defaults, str) else defaults
        if not isinstance(items, list):
            self.refuse(place, "has to be a file's name or a list of them", defaults)
            return [(None, place)]
        entries: list[tuple[str | None, str]] = []
        for index, item in enumerate(items):
            if not isinstance(item, str) or not item.strip():
                self.refuse(f"{place}[{index}]", "write a file's name or _self_", item)
            else:
                entries.append((None if item == "_self_" else item, f"{place}[{index}]"))
        own = [entry for entry, _ in entries].count(None)
        if own > 1:
            self.problems.append(Problem(place, "_self_ is listed twice; keep one"))
        return entries if own else [*entries, (None, place)]

    def _add_entry(self, entry: str, where: str, stack: tuple[FilePath, ...]) -> None:
        name = posixpath.normpath(entry.removesuffix(".yaml"))
        if name.startswith(("/", "..")):
            message = "names are looked up in the file's folder, then among the shipped ones; write the name without a path"
            self.refuse(where, message, entry)
            return
        try:
            # A shipped file builds on shipped files only, even if the user's folder has the same names.
            path = self.found(name, CONFIGS if stack[-1].parent == CONFIGS else self.folder)
            if path is None:
                self.refuse(where, f"no {name}.yaml in {searched(self.folder)}; {suggestion(name, self.folder)}", entry)
            elif path.resolve() in stack:
                chain = " -> ".join(one.stem for one in (*stack, path.resolve()))
                self.refuse(where, f"loads itself: {chain}", entry)
            else:
                self.add_file(path, name, stack)
        except ValueError as error:
            self.refuse(where, str(error), entry)


def find(name: str, folder: FilePath) -> FilePath | None:
    return next((path for path in (folder / f"{name}.yaml", CONFIGS / f"{name}.yaml") if is_file(path)), None)


def searched(folder: FilePath) -> str:
    return str(folder) if folder.resolve() == CONFIGS else f"{folder}, nor among the shipped ones in {CONFIGS}"


def suggestion(name: str, folder: FilePath) -> str:
    own, shipped = ([path.stem for path in one.glob("*.yaml")] for one in (folder, CONFIGS))
    return did_you_mean(name, [*own, *shipped] if close_names(name, [*own, *shipped]) or not own else own)


def compose(name: str, folder: FilePath, overrides: Sequence[str], *, may_be_left_out: bool = False) -> Composition:
    """Compose a configuration. `may_be_left_out`: accept missing values (`???`)."""
    composed = Composition(folder, may_be_left_out)
    parsed = [parse_override(text) for text in overrides]
    composed.problems += [one for one in parsed if isinstance(one, Problem)]
    composed.add_file(composed.found(name, folder) or folder / f"{name}.yaml", name, ())
    tree: dict[str, Any] = {}
    for layer in composed.layers:
        merge(tree, layer)
    for override in names_first([one for one in parsed if isinstance(one, Override)]):
        composed.problems += apply_override(tree, override)
        path, origins = override.path, composed.origins
        for place in [place for place in origins if place[: len(path)] == path]:
            del origins[place]
        for depth in range(1, len(path) + 1):
            origins.setdefault(path[:depth], "command line")
    _add_presets(tree, composed)
    composed.data = _resolve(OmegaConf.create(tree), (), composed)
    return composed


def _add_presets(tree: dict[str, Any], composed: Composition) -> None:
    domains: Any = tree.get("domains")
    for name, domain in domains.items() if isinstance(domains, dict) else ():
        data = domain.get("data") if isinstance(domain, dict) else None
        if not isinstance(data, dict):
            continue
        if "validation" not in data and data.get("validation_preset") is not None:
            with suppress(ValueError):  # reported by the schema
                data["validation"] = validation_preset(str(data["validation_preset"]))
        if data.get("preset") is not None:
            path = ("domains", name)
            try:
                domains[name] = expanded(domain, path)
            except ValueError as error:
                composed.refuse(dotted((*path, "data", "preset")), str(error), data["preset"], (*path, "data"))
                composed.broken.add((*path, "reward"))  # so that it does not count as missing


def expanded(domain: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Apply the domain's preset as defaults. If the domain sets `data.train`, the preset's data files are ignored."""
    data = domain["data"]
    entry = preset(str(data["preset"]))
    full: dict[str, Any] = copy.deepcopy(entry["domain"])
    splits = {} if "train" in data else {split: entry[split] for split in ("train", "validation") if split in entry}
    full["data"] = {**splits, **full.get("data", {})}
    merge(full, domain, path)
    sampling, filters = full.get("sampling"), full["data"].setdefault("filter", {})
    if isinstance(filters, dict) and isinstance(sampling, dict) and isinstance(longest := sampling.get("max_prompt_tokens"), int):
        filters.setdefault("prompt_tokens", [1, longest])  # drops longer prompts, and reports how many
    return full


# ---------------------------------------------------------------- interpolations

_from_environment: ContextVar[list[str] | None] = ContextVar("_from_environment", default=None)


def _environment(key: str, *default: Any) -> Any:
    if (variables := _from_environment.get()) is not None:
        variables.append(key)
    return oc.env(key, *default)


def _resolve(node: DictConfig | ListConfig, path: Path, composed: Composition) -> Any:
    """Replace `${...}`; report unresolvable values and mark their paths as broken."""
    keys: list[Any] = list(range(len(node))) if isinstance(node, ListConfig) else list(node.keys())
    result: dict[str, Any] = {}
    for key in keys:
        result[str(key)] = None
        here = (*path, str(key))
        if OmegaConf.is_missing(node, key):
            if composed.may_be_left_out:
                result[str(key)] = LEFT_OUT
                continue
            composed.problems.append(Missing(dotted(here), f"has to be given, for example on the command line: {dotted(here)}=..."))
            composed.broken.add(here)
            continue
        raw = OmegaConf.to_container(node, resolve=False)[key] if OmegaConf.is_interpolation(node, key) else NO_VALUE  # type: ignore[index]
        variables: list[str] = []
        token = _from_environment.set(variables)
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError, ValueError) as error:
            composed.refuse(dotted(here), _why(error, variables), raw, here)
            continue
        finally:
            _from_environment.reset(token)
        if isinstance(value, DictConfig | ListConfig):
            if len(here) > DEEPEST:
                composed.refuse(dotted(here), "with its interpolations written out it holds itself", raw, here)
                return None
            value = _resolve(value, here, composed)
        elif variables:
            if words_at(here).startswith(("integer", "number", "true or false")) and isinstance(value, str):
                decoded = parse_yaml(value, "").data
                value = decoded if isinstance(decoded, bool | int | float) else value
            composed.secrets[here] = (str(raw), value)
        result[str(key)] = value
    if isinstance(node, ListConfig):
        return list(result.values())
    return {key: value for key, value in result.items() if (*path, key) not in composed.broken}


def _why(error: Exception, variables: list[str]) -> str:
    for variable in variables:
        if f"Environment variable '{variable}' not found" in str(error):
            return f"the environment variable {variable} is not set"
    return "cannot be resolved" if any(variable in os.environ for variable in variables) else first_line(error)


OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
