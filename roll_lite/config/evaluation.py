"""Configurations with `mode: evaluate`. Settings that only training reads are removed before validation: they may be missing or wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roll_lite.config.checks.scoring_models import SCORERS
from roll_lite.config.compose.layers import Composition
from roll_lite.config.problems import Missing, Path, covers, dotted

TRAINING = (
    *("steps", "actor_train", "reference", "critic", "replay", "algorithm", "batches", "checkpoint", "weight_sync", "profile", "chaos"),
    *("validation.enabled", "domains.*.share", "domains.*.min_prompts", "domains.*.samples_per_prompt"),
    *(f"domains.*.data.{name}" for name in ("train", "weight", "epochs", "filter.difficulty", "filter.difficulty_range")),
)
ROLLOUT = ("request_timeout_s", "retries", "restarts", "max_tokens_per_engine")


def without_training(composed: Composition) -> Composition:
    """Remove settings of training and, if some domains have held-out prompts, the other domains."""
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
