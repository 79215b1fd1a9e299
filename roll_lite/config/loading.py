"""From a name and overrides to one checked, frozen RunConfig, or to one ConfigError with everything that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath

from roll_lite.config.checks import Check, check
from roll_lite.config.compose import compose, find_config, suggestion
from roll_lite.config.problems import ConfigError, Path, Problem
from roll_lite.config.schema import RunConfig
from roll_lite.config.validation import validate


def load_config(
    name: str, folder: FilePath, overrides: Sequence[str] = (), *, allow_scripted: bool = False, further: Sequence[Check] = ()
) -> RunConfig:
    """`name` is a file in `folder` or a shipped one, with or without .yaml. `allow_scripted` admits the scripted engine, for tests and
    simulations. `further`: see `check`."""
    name = name.removesuffix(".yaml")
    if not folder.is_dir() or not find_config(name, folder).is_file():
        raise ConfigError(name, [_no_such_config(name, folder)])
    composed = compose(name, folder, overrides)
    validated = validate(composed.data, composed.broken)
    cross = check(validated.partial, allow_scripted=allow_scripted, further=further)
    problems = [_with_source(problem, composed.origins) for problem in [*composed.problems, *validated.problems, *cross]]
    if problems:
        raise ConfigError(name, list({str(problem): problem for problem in problems}.values()))
    return RunConfig.model_validate(validated.data)


def _no_such_config(name: str, folder: FilePath) -> Problem:
    if not folder.is_dir():
        return Problem("--config-path", f"no such folder: {folder.absolute()}", str(folder))
    return Problem("--config-name", f"no {name}.yaml in {folder.absolute()}; {suggestion(name, folder)}", name)


def _with_source(problem: Problem, origins: dict[Path, str]) -> Problem:
    """Where the value at the problem's path was written, or the section that holds it."""
    path: Path = tuple(problem.path.split("."))
    while path and path not in origins:
        path = path[:-1]
    return problem if problem.source or not path else problem.at(origins[path])
