"""Compare a resumed run's settings with its checkpoint's: which changes are refused, let samples in flight continue, or reset driver state
(docs/checkpoints.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll_lite.config.problems import covers, show

NOT_COMPARED = ("experiment", "run_dir", "checkpoint.resume", "simulation")
MOST_CHANGES = 12
ABSENT = "absent"

FIXED = ("mode", "seed", "actor_train.lora.rank", "actor_train.lora.alpha", "actor_train.lora.targets")
"""Settings that may not change."""

OF_SAMPLES = ("model", "domains", "rollout", "actor_infer", "reward_models", "judges")
"""Sections that affect how samples are generated and scored."""
OF_ENGINES = tuple(f"actor_infer.strategy.{name}" for name in ("quantization", "max_model_len", "engine_args"))
HARMLESS = (
    *(f"actor_infer.{name}" for name in ("devices", "strategy", "offload", "threads", "restarts", "replicas_per_device", "most_replicas")),
    *(f"reward_models.*.{name}" for name in ("devices", "strategy", "offload", "threads", "micro_batch_tokens", "micro_batch_size")),
    *(f"rollout.{name}" for name in ("request_timeout_s", "retries", "restarts", "dump", "max_tokens_per_engine", "stream_log_probs")),
    *("judges.*", "rollout.max_mismatch", "rollout.on_mismatch", "domains.*.share", "domains.*.validation_sampling"),
    *(f"domains.*.reward.{name}" for name in ("workers", "timeout_s", "start_timeout_s", "retries")),
    *(f"domains.*.environment.{name}" for name in ("workers", "parallel", "turn_timeout_s", "start_timeout_s", "url")),
    *(f"domains.*.data.{name}" for name in ("validation", "validation_preset", "report_by")),
)
"""Settings in OF_SAMPLES that do not affect samples, except those in OF_ENGINES. `*` matches any name."""

# Per part of the driver's state (RLVRPipeline.remembering): its name in messages, and settings whose change makes the saved state wrong.
STARTS_ANEW = {
    **{
        term: (f"the coefficient of algorithm.{term}", (f"algorithm.{term}.coef", f"algorithm.{term}.controller.name"))
        for term in ("kl_in_reward", "kl_in_loss")
    },
    "shaping": (
        "the running moments of algorithm.reward.normalize",
        (
            *("algorithm.reward", "algorithm.masks", *(f"domains.*.reward.{name}" for name in ("name", "args", "terms", "format"))),
            "reward_models.*.path",
        ),
    ),
    "agreement": (
        "the usual difference between engines and trainer",
        (
            *("actor_infer.dtype", "actor_infer.strategy", "actor_train.strategy.layers", "actor_train.lora.engines"),
            *("rollout.keep_mask", "algorithm.old_log_probs", "algorithm.routing_replay"),
        ),
    ),
}


@dataclass(frozen=True)
class Change:
    path: str
    before: Any
    now: Any

    @property
    def is_fixed(self) -> bool:
        return covers(FIXED, self.path) or any(entry.startswith(f"{self.path}.") for entry in FIXED)  # a section added or removed

    @property
    def is_harmless(self) -> bool:
        """True if samples in flight may continue."""
        return self.path.split(".")[0] not in OF_SAMPLES or (covers(HARMLESS, self.path) and not covers(OF_ENGINES, self.path))

    def __str__(self) -> str:
        before, now = (ABSENT if value == ABSENT else show(value, self.path) for value in (self.before, self.now))
        return f"{self.path}: {before} -> {now}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any], below: str = "") -> Iterator[Change]:
    """Yield the settings that differ. A section that one side lacks is a single change."""
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
    return all(change.is_harmless for change in changes(before, now))


def refused(before: Mapping[str, Any], now: Mapping[str, Any], is_trained: bool) -> list[Change]:
    """Return changes that prevent resuming. `is_trained`: the run trains its actor; otherwise its LoRA settings may change."""
    found = [change for change in changes(before, now) if change.is_fixed and change.before != ABSENT]
    return [change for change in found if is_trained or not change.path.startswith("actor_train.")]


def started_anew(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = list(changes(before, now))
    return [part for part, (_, settings) in STARTS_ANEW.items() if any(covers(settings, change.path) for change in found)]


def described(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    found = list(map(str, changes(before, now)))
    if not found:
        return "every setting is as it was"
    more = [f"and {len(found) - MOST_CHANGES} more"] if len(found) > MOST_CHANGES else []
    anew = [STARTS_ANEW[part][0] for part in started_anew(before, now)]
    more += [f"so this starts anew: {', '.join(anew)}"] if anew else []
    return "\n  ".join(["these settings differ from the checkpoint's (roll-lite docs checkpoints):", *found[:MOST_CHANGES], *more])
