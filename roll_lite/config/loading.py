from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from roll_lite.config.arithmetic import roles
from roll_lite.config.checks.across import Check, check
from roll_lite.config.checks.layout import model_folder
from roll_lite.config.checks.scoring_models import SCORERS
from roll_lite.config.compose.layers import Composition, compose, find, searched, suggestion
from roll_lite.config.placement import placed
from roll_lite.config.problems import NO_VALUE, ConfigError, Missing, Path, Problem, covers, dotted, or_nearest
from roll_lite.config.schema.base import LATEST
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import validate, value_at
from roll_lite.files import absolute_path, is_file, is_folder, listing
from roll_lite.hub import fetch, lacks_weights, online


def located(name: str, folder: FilePath | None) -> tuple[str, FilePath]:
    with suppress(ValueError):  # reported as a mistake of --config-name
        path = absolute_path(FilePath(f"{name.removesuffix('.yaml')}.yaml"))
        if folder is None and is_file(path):
            return path.name.removesuffix(".yaml"), path.parent
    return name, absolute_path(folder or FilePath())


def load_config(
    name: str,
    folder: FilePath,
    overrides: Sequence[str] = (),
    *,
    further: Sequence[Check] = (),
    files: bool = True,
    weights: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> RunConfig:
    """Load a configuration, shipped or in `folder`. ConfigError lists all mistakes.

    `files`: if False, neither read nor download models and data. `weights`: download missing weights after all checks. `tell` receives
    notes.
    """
    name = name.removesuffix(".yaml")
    if (wrong := _no_such_config(name, folder)) is not None:
        raise ConfigError(name, [wrong])
    composed = compose(name, folder, overrides, may_be_left_out=not files)
    if composed.data.get("mode") == "evaluate":
        composed = without_training(composed)
    for line in composed.replaced_files:
        tell(line)
    with online(tell) if files else nullcontext():
        valid, refused = validate(composed.data, composed.broken)
    config, unplaceable = placed(valid)
    moving = () if value_at(config, "checkpoint.resume") in (None, NO_VALUE) else _through_latest(composed.data)
    problems = [*composed.problems, *refused, *moving, *unplaceable, *check(config, further=further, files=files)]
    if weights and not problems:
        missing = [folder for role in roles(config).values() if lacks_weights(folder := model_folder(config, role))]
        for folder in missing:
            fetch(folder, tell)
        problems = check(config, files=files) if missing else []
    problems = [_with_source(problem, composed.origins) for problem in problems]
    if problems:
        problems = [_without_secrets(problem, composed) for problem in problems]
        raise ConfigError(name, list({str(problem): problem for problem in problems}.values()), config)
    config._as_written.update({path: text for path, (text, _) in composed.secrets.items()})
    return config


def _through_latest(data: Any, path: Path = ()) -> Iterator[Problem]:
    """Refuse paths through the link `latest` when a run is resumed: the link may point to another run than when the resumed run began."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            for one in (key, value):  # data.train: {file: weight}
                yield from _through_latest(one, (*path, str(key)))
    elif isinstance(data, str) and path != ("checkpoint", "resume") and LATEST in (parts := FilePath(data).parts):
        with suppress(OSError, RuntimeError):  # too long a name, an unknown home folder
            link = absolute_path(FilePath(*parts[: parts.index(LATEST) + 1]))
            if link.is_symlink() and (link / "config.yaml").is_file():  # a run's folder
                message = (
                    f"with checkpoint.resume, name the run itself, as its config.yaml does: {LATEST} leads to another run at each start"
                )
                yield Problem(dotted(path), message, data)


def _no_such_config(name: str, folder: FilePath) -> Problem | None:
    try:
        if not is_folder(folder):
            if is_file(folder):
                return Problem("--config-path", "is a file; name its folder here, and the file with --config-name", str(folder))
            near = or_nearest(folder.name, [one.name for one in listing(folder.parent) if one.is_dir()]) if is_folder(folder.parent) else ""
            return Problem("--config-path", f"no such folder: {folder.absolute()}{near}", str(folder))
        if find(name, folder) is not None:
            return None
        if is_file(other := folder / f"{name.removesuffix('.yml')}.yml"):
            return Problem("--config-name", f"{other} ends in .yml; rename it: configurations end in .yaml", name)
    except ValueError as error:
        return Problem("--config-name", str(error), name)
    return Problem("--config-name", f"no {name}.yaml in {searched(folder.absolute())}; {suggestion(name, folder)}", name)


def _without_secrets(problem: Problem, composed: Composition) -> Problem:
    """Replace values of environment variables in a problem by the file's text, such as `${oc.env:NAME}`."""
    for path, (text, secret) in composed.secrets.items():
        if problem.value is not NO_VALUE and problem.path == dotted(path):
            problem = replace(problem, value=text)
        elif isinstance(problem.value, dict | list) and dotted(path).startswith(f"{problem.path}."):
            problem = replace(problem, value=NO_VALUE)
        if isinstance(secret, str) and len(secret.strip()) > 2:
            problem = replace(problem, message=problem.message.replace(secret, text))
    return problem


def _with_source(problem: Problem, origins: dict[Path, str]) -> Problem:
    path: Path = tuple(problem.path.split("."))
    while path and path not in origins:
        path = path[:-1]
    return problem if problem.source or not path else replace(problem, source=origins[path])


# ---------------------------------------------------------------- mode: evaluate


TRAINING = (
    *("steps", "actor_train", "reference", "critic", "replay", "algorithm", "batches", "checkpoint", "weight_sync", "profile", "chaos"),
    *("validation.enabled", "domains.*.share", "domains.*.min_prompts", "domains.*.samples_per_prompt"),
    *(f"domains.*.data.{name}" for name in ("train", "weight", "epochs", "filter.difficulty", "filter.difficulty_range")),
)
ROLLOUT = ("request_timeout_s", "retries", "restarts", "max_tokens_per_engine")


def without_training(composed: Composition) -> Composition:
    """Remove settings that only training reads, which may then be missing or wrong, and, if some domains have held-out prompts, the other
    domains."""
    domains = composed.data.get("domains")
    domains = domains if isinstance(domains, dict) else {}
    sections = {name: domain.get("data") for name, domain in domains.items() if isinstance(domain, dict)}
    held_out = {name for name, data in sections.items() if isinstance(data, dict) and data.get("validation")} or set(sections)
    evaluated = [domains[name] for name in held_out]
    left_out = {"domains": set(sections) - held_out}
    left_out |= {section: _unused(section, composed.data.get(section), evaluated) for section in SCORERS}

    def is_left_out(path: Path) -> bool:
        if len(path) > 1 and (path[1] in left_out.get(path[0], ()) or (path[0] == "rollout" and path[1] not in ROLLOUT)):
            return True
        return covers(TRAINING, dotted(path))

    def kept(data: Any, path: Path = ()) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: kept(value, (*path, key)) for key, value in data.items() if not is_left_out((*path, key))}

    data = kept(composed.data)
    if data.get("validation", {}) is None:
        del data["validation"]
    problems = [one for one in composed.problems if not (isinstance(one, Missing) and is_left_out(tuple(one.path.split("."))))]
    broken = {path for path in composed.broken if not path or not is_left_out(path)}
    return replace(composed, data=data, problems=problems, broken=broken)


def _unused(section: str, models: Any, domains: list[dict[str, Any]]) -> set[str]:
    # If a reward names an unknown one, none counts as unused: the name may be misspelt.
    _, reward, argument = SCORERS[section]
    rewards = [domain["reward"] for domain in domains if isinstance(domain.get("reward"), dict)]
    terms = [term for one in rewards if isinstance(one.get("terms"), list) for term in one["terms"] if isinstance(term, dict)]
    parts = [part["args"] for part in [*rewards, *terms] if part.get("name") == reward and isinstance(part.get("args"), dict)]
    named = {str(args[argument]) for args in parts if argument in args}
    return set(models) - named if isinstance(models, dict) and named <= set(models) else set()
