"""Find rollout dumps, and check that a run can train on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roll_lite.config.arithmetic import group_size
from roll_lite.config.problems import Problem
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.environments import EndpointEnvironmentConfig
from roll_lite.config.schema.models import LoraConfig, OptimizerConfig, RefreshConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import elsewhere, first_line, is_folder, kind_of, listed, listing
from roll_lite.models.hf_config import read_model_shape
from roll_lite.models.model_files import tokenizer_checksum
from roll_lite.observability.run_folder import resumed_from

FOLDER = "dumps"
NAME = re.compile(r"step_(\d+)\.parquet")
FORMAT = "roll_lite.dump"
SCHEMA_VERSION = 1
METADATA = "roll_lite"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "min_tokens")
"""Settings that change the sampling distribution; a dump and the run that trains on it must agree."""


@dataclass(frozen=True)
class DumpHeader:
    path: Path
    step: int
    config: dict[str, Any]
    tokenizer: str
    largest_token: int
    domains: dict[str, dict[str, int]]
    """{domain: {`samples`: number of training samples; `longest_prompt`, `longest_response`, `longest_row` (prompt and response): tokens}}.
    Older dumps lack `longest_row`."""
    baselines: bool
    stats: dict[str, Any]


def dump_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def found_dumps(path: Path) -> dict[int, Path]:
    """Return {step: dump file}; ValueError without any. `path`: a folder of dumps, or of a run. A resumed run's earlier dumps come from
    its predecessors."""
    if (kind := kind_of(path)) != "folder":
        raise ValueError(
            f"{path} is a file; name a run's folder, or that of its dumps" if kind else f"no such folder: {path}{elsewhere(path)}"
        )
    dumps = _of_run(path) if is_folder(path / FOLDER) else _within(path)
    if not dumps:
        raise ValueError(f"{path} holds no dumps ({FOLDER}/step_*.parquet); the run that is to be replayed needs rollout.dump: true")
    return dumps


def _of_run(run: Path) -> dict[int, Path]:
    dumps, seen = _within(run / FOLDER), {run}
    while dumps and min(dumps) > 1 and (checkpoint := resumed_from(run)) is not None:
        run = checkpoint.parent.parent
        if run in seen or not is_folder(run / FOLDER):
            break
        seen.add(run)
        dumps |= {step: path for step, path in _within(run / FOLDER).items() if step < min(dumps)}
    return dumps


def _within(folder: Path) -> dict[int, Path]:
    return {int(match[1]): path for path in listing(folder) if (match := NAME.fullmatch(path.name))}


def read_header(path: Path) -> DumpHeader:
    """Read a dump's metadata; ValueError for a damaged file, no dump, or another schema version."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.read_metadata(path).metadata or {}
    except (ArrowException, OSError) as error:
        raise damaged(path, error) from error
    if METADATA.encode() not in metadata:
        raise ValueError(f"{path} is no dump of rollouts: it has no {METADATA!r} among its metadata")
    try:
        header = json.loads(metadata[METADATA.encode()])
        named, version = header["format"], header["schema_version"]
        if named != FORMAT:
            raise ValueError(f"{path} is no dump of rollouts: its format is {named!r}, expected {FORMAT!r}")
        if version != SCHEMA_VERSION:
            writer = header.get("made_by", "another program")
            raise ValueError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; it was written by {writer}")
        return DumpHeader(path, **{name: header[name] for name in DumpHeader.__dataclass_fields__ if name != "path"})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: BaseException) -> ValueError:
    return ValueError(f"{path} is damaged: it cannot be read as a dump ({type(error).__name__}: {first_line(error)})")


# ---------------------------------------------------------------- do they fit this run


def check_dumps(config: RunConfig) -> Iterator[Problem]:
    path = config.replay.path
    if config.mode != "train_only" or path is None:
        return
    try:
        files = found_dumps(path)
        if missing := [step for step in range(1, config.steps + 1) if step not in files]:
            use = f"; use steps: {usable}" if (usable := missing[0] - 1) else ""
            yield Problem("replay.path", f"has no dump of step {listed(missing)}, the run is to train {config.steps} steps{use}", str(path))
        headers = [read_header(file) for step, file in sorted(files.items()) if step <= config.steps]
    except (ValueError, OSError) as error:
        yield Problem("replay.path", str(error), str(path))
        return
    try:
        wrong = [*_lengths(config, headers), *(problem for header in headers for problem in _fits(config, header))]
        # All dumps usually have the same problem; report it once.
        yield from {problem.path: problem for problem in reversed(wrong)}.values()
        yield from _same_policy(config, headers)
    except (KeyError, TypeError) as error:
        yield Problem("replay.path", f"the dumps' own configuration lacks something ({type(error).__name__}: {error})", str(path))


def _lengths(config: RunConfig, headers: Sequence[DumpHeader]) -> Iterator[Problem]:
    for name, domain in config.domains.items():
        if isinstance(domain.environment, EndpointEnvironmentConfig):  # only the sum limits an agent's conversations
            longest = max((header.domains[name].get("longest_row", 0) for header in headers if name in header.domains), default=0)
            both, path = domain.sampling.max_prompt_tokens + domain.sampling.max_tokens, f"domains.{name}.sampling.max_tokens"
            if longest > both:
                message = f"the dumps have a conversation of {longest} tokens; with max_prompt_tokens there is room for {both}"
                yield Problem(path, message, domain.sampling.max_tokens)
            continue
        for what, limit in {"prompt": "max_prompt_tokens", "response": "max_tokens"}.items():
            longest = max((header.domains[name][f"longest_{what}"] for header in headers if name in header.domains), default=0)
            given = getattr(domain.sampling, limit)
            if longest > given:
                yield Problem(f"domains.{name}.sampling.{limit}", f"the dumps have a {what} of {longest} tokens; use at least that", given)


def _fits(config: RunConfig, header: DumpHeader) -> Iterator[Problem]:
    yield from _fits_model(config, header)
    made = header.config
    for name in header.domains:
        if name not in config.domains:
            message = f"{header.path} holds samples of the domain {name!r}; configured are {', '.join(config.domains)}"
            yield Problem("domains", message, name)
            continue
        place, domain, recorded = f"domains.{name}", config.domains[name], made["domains"][name]
        for key in SAMPLING:
            given, was = getattr(domain.sampling, key), recorded["sampling"][key]
            if given != was:
                yield Problem(f"{place}.sampling.{key}", f"the dumps were sampled with {was}, whose log-probs they hold; use {was}", given)
        given, was = domain.reward.format, recorded["reward"]["format"]
        if given is not None and (was is None or was["pattern"] != given.pattern):
            was = "none" if was is None else repr(was["pattern"])
            yield Problem(f"{place}.reward.format.pattern", f"responses were matched when they were dumped, with {was}", given.pattern)
        was = recorded["samples_per_prompt"] or made["rollout"]["samples_per_prompt"]
        if group_size(config, domain) != was:
            key = "rollout" if domain.samples_per_prompt is None else place
            yield Problem(f"{key}.samples_per_prompt", f"the dumps have groups of {was}; use {was}", group_size(config, domain))
    for key in ("prompts_per_step", "keep_mask"):
        given, was = getattr(config.rollout, key), made["rollout"][key]
        if given != was:
            yield Problem(f"rollout.{key}", f"the dumps were made with {json.dumps(was)}; use {json.dumps(was)}", given)
    if config.algorithm.advantage.name == "remax" and not header.baselines:
        yield Problem("algorithm.advantage.name", f"remax needs greedy baselines; {header.path} has none", "remax")


def _fits_model(config: RunConfig, header: DumpHeader) -> Iterator[Problem]:
    folder = config.model.path
    if not is_folder(folder):
        return
    try:
        shape, tokenizer = read_model_shape(folder), tokenizer_checksum(folder)
    except ValueError:
        return
    if tokenizer != header.tokenizer:
        message = f"{header.path} was made with another tokenizer: its token ids stand for other texts; use the model that was sampled from"
        yield Problem("model.path", message, str(folder))
    elif header.largest_token >= shape.vocab_size:
        message = f"{header.path} has the token {header.largest_token}, the model's vocabulary (vocab_size) has {shape.vocab_size} rows"
        yield Problem("model.path", message, str(folder))


def _same_policy(config: RunConfig, headers: Sequence[DumpHeader]) -> Iterator[Problem]:
    """Report training settings that differ from the dumps' run. This run's policy then differs from the one that sampled, but `current` and
    `recompute` of algorithm.old_log_probs assume the same policy."""
    algorithm = config.algorithm
    if algorithm.weighs_by_rollout:
        return
    for name in ("seed", "model", "steps", "algorithm", "actor_train", "reference", "critic", "domains"):
        _validate_all(getattr(config, name))  # raises Refused if a compared field is invalid
    mine = config.model_dump(mode="json")  # as dumps store it
    differences = [found for header in headers[:-1] if (found := _differences(mine, header.config))]
    if differences:
        message = (
            f"from the second step on this run's policy is not the one that sampled ({differences[0]}), which {algorithm.old_log_probs} "
            "takes it for; use rollout, or set algorithm.mismatch_correction.weight"
        )
        yield Problem("algorithm.old_log_probs", message, algorithm.old_log_probs)


def _differences(config: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    if made["mode"] != "full":
        return f"mode {made['mode']} sampled all dumps with the same weights"
    mine, its = _training_settings(config), _training_settings(made)
    different = [name for name, value in mine.items() if value != its[name]]
    return f"{', '.join(different)} {'differs' if len(different) == 1 else 'differ'}" if different else ""


def _training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    actor, critic = config["actor_train"], config["critic"]
    refresh = _complete(RefreshConfig, (config.get("reference") or {}).get("refresh"))
    optimizers = [_complete(OptimizerConfig, role["optimizer"]) for role in (actor, critic) if role]
    adapters = _complete(LoraConfig, actor.get("lora"))
    return {
        "seed": config["seed"],
        "model.dtype": config["model"]["dtype"],
        "steps": config["steps"] if any(one["decay"] != "constant" for one in optimizers) else None,
        "algorithm": _complete(AlgorithmConfig, config["algorithm"]),
        "actor_train.optimizer": optimizers[0],
        "actor_train.balance_coef": actor.get("balance_coef", 0.0),
        "actor_train.lora": adapters and {**adapters, "targets": sorted(adapters["targets"]), "export": None, "engines": None},
        "reference.refresh": refresh,
        "actor_train.ema": refresh and refresh["weights"] == "ema" and actor.get("ema"),
        "critic": critic and [critic["init"], critic["path"], *optimizers[1:], critic.get("balance_coef", 0.0)],
        "domains.*.reward": {name: [one["reward"][key] for key in ("weight", "format")] for name, one in config["domains"].items()},
    }


def _complete(section: type[Section], values: Any) -> Any:
    """Add the defaults of fields newer than the dump. Invalid settings stay unchanged."""
    try:
        return values if values is None else section.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values


def _validate_all(value: Any) -> None:
    if isinstance(value, Section):
        for name in type(value).model_fields:
            _validate_all(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            _validate_all(item)
