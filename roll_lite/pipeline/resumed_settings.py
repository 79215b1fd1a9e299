"""Effects of changing settings when a run resumes from a checkpoint: which changes are refused, how others are described at the start.
docs/checkpoints.md has the same table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch
from typing import Any

from roll_lite.config.problems import show

NOT_COMPARED = ("experiment", "run_dir", "checkpoint.resume", "simulation")
MOST_CHANGES = 12
ABSENT = "absent"


class Effect(Enum):
    REFUSED = "may not change"
    START_ONLY = "read at a start only: the weights come from the checkpoint"
    SAME_COUNT = "refused if a domain's number of prompts changes (a domain under another name starts at its first prompt)"
    COUNTED_ANEW = "domains are counted anew, from the next step"
    NEXT_STEP = "holds from the next step"
    NOT_TRAINING = "how, where and how fast; what is trained stays, but for rounding"


RUNNING = ("devices", "strategy", "offload", "threads", "micro_batch_tokens", "micro_batch_size")
"""Settings of how and where a role runs."""

OF_SAMPLES = ("model", "domains", "rollout", "actor_infer", "reward_models", "judges")
"""Sections that affect how samples are generated and scored."""

TABLE: Mapping[Effect, tuple[str, ...]] = {
    Effect.REFUSED: ("mode", "seed", "actor_train.lora.rank", "actor_train.lora.alpha", "actor_train.lora.targets"),
    Effect.START_ONLY: ("model.path", "critic.path", "critic.init", "actor_train.lora.path"),
    Effect.SAME_COUNT: (
        *(f"domains.*.data.{name}" for name in ("preset", "train", "tag", "tags", "filter", "prompt", "answer")),
        *("domains.*.template", "domains.*.sampling.max_prompt_tokens", "algorithm.ptx.data"),
    ),
    Effect.COUNTED_ANEW: ("domains.*.share",),
    Effect.NEXT_STEP: tuple(f"actor_infer.strategy.{name}" for name in ("quantization", "max_model_len", "engine_args")),
    Effect.NOT_TRAINING: (
        *(
            "placement",
            "ray",
            "limits",
            "chaos",
            "trackers",
            "profile",
            "report_every",
            "batches",
            "checkpoint",
            "weight_sync",
            "validation",
            "judges.*",
        ),
        *(f"{role}.{name}" for role in ("*", "reward_models.*") for name in RUNNING),
        *("*.restarts", "*.train_micro_batch_tokens", "*.train_micro_batch_size", "*.compare_replicas_every"),
        *("actor_infer.replicas_per_device", "actor_train.lora.engines", "actor_train.lora.export"),
        *(f"rollout.{name}" for name in ("request_timeout_s", "retries", "dump", "max_tokens_per_engine", "stream_log_probs")),
        *("rollout.max_mismatch", "rollout.on_mismatch", "actor_infer.most_replicas"),
        *(f"domains.*.reward.{name}" for name in ("workers", "timeout_s", "start_timeout_s", "retries")),
        *(f"domains.*.environment.{name}" for name in ("workers", "parallel", "turn_timeout_s", "start_timeout_s", "url")),
        *("domains.*.data.validation", "domains.*.data.validation_preset", "domains.*.data.report_by", "domains.*.validation_sampling"),
    ),
}
"""Settings by effect of a change; the first match counts. An entry covers all settings below it; `*` matches any name. NEXT_STEP: also
settings not listed."""


@dataclass(frozen=True)
class Change:
    path: str
    before: Any
    now: Any

    @property
    def effect(self) -> Effect:
        if any(entry.startswith(f"{self.path}.") for entry in TABLE[Effect.REFUSED]):
            return Effect.REFUSED  # a section that was added or removed
        return next((effect for effect, entries in TABLE.items() if any(_covers(entry, self.path) for entry in entries)), Effect.NEXT_STEP)

    def __str__(self) -> str:
        before, now = (ABSENT if value == ABSENT else show(value, self.path) for value in (self.before, self.now))
        return f"{self.path}: {before} -> {now}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any], below: str = "") -> Iterator[Change]:
    """Yield the settings that differ. A section in only one configuration is one change."""
    for name in {**before, **now}:
        path = f"{below}{name}"
        was, is_now = before.get(name, ABSENT), now.get(name, ABSENT)
        if path in NOT_COMPARED or was == is_now or (path == "actor_train.lora.targets" and sorted(was) == sorted(is_now)):
            continue
        if isinstance(was, dict) and isinstance(is_now, dict) and was and is_now:
            yield from changes(was, is_now, f"{path}.")
        else:
            yield Change(path, was, is_now)


def samples_continue(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if no change affects how samples are generated and scored, so that samples in flight may continue."""
    harmless = Effect.NOT_TRAINING, Effect.COUNTED_ANEW
    return all(change.effect in harmless or change.path.split(".")[0] not in OF_SAMPLES for change in changes(before, now))


def refused(before: Mapping[str, Any], now: Mapping[str, Any], is_trained: bool) -> list[Change]:
    """Return the changes that prevent resuming. `is_trained`: the run trains its actor; otherwise changes of its LoRA settings are
    allowed."""
    found = [change for change in changes(before, now) if change.effect is Effect.REFUSED and change.before != ABSENT]
    return [change for change in found if is_trained or not change.path.startswith("actor_train.")]


def described(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    by_effect: dict[Effect, list[Change]] = {}
    for change in changes(before, now):
        by_effect.setdefault(change.effect, []).append(change)
    if not by_effect:
        return "every setting is as it was"
    lines = []
    for effect in (effect for effect in Effect if effect in by_effect):
        told = by_effect[effect]
        more = [f"and {len(told) - MOST_CHANGES} more"] if len(told) > MOST_CHANGES else []
        lines.append(f"  {effect.value}: {'; '.join([*map(str, told[:MOST_CHANGES]), *more])}")
    return "\n".join(["these settings differ from the checkpoint's (docs/checkpoints.md):", *lines])


def _covers(entry: str, path: str) -> bool:
    wanted, given = entry.split("."), path.split(".")
    return len(wanted) <= len(given) and all(fnmatch(name, pattern) for name, pattern in zip(given, wanted, strict=False))
