"""Warnings from the metrics of a step: signs that a run learns nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Metrics = Mapping[str, float]

IN_A_ROW = 3
"""Consecutive steps with a sign before it is reported."""
TRUNCATED_ABOVE = 0.5
ENTROPY_LEFT = 0.02
"""Share of the first step's entropy that counts as a collapse."""
GRADIENT_GROWTH = 100.0
"""Multiple of the median gradient norm of earlier steps that counts as an explosion."""
GRADIENT_STEPS = 5
"""Fewest earlier steps for that median."""
REMEMBERED = 50
"""Earlier steps kept for the median."""


@dataclass
class Finding:
    sign: str
    message: str
    first_step: int
    steps: int = 1


@dataclass(frozen=True)
class Sign:
    name: str
    in_a_row: int
    holds: Callable[[Metrics, Sequence[Metrics]], bool]
    """Takes the step's metrics and earlier ones: the first with an entropy, and the latest."""
    says: Callable[[Metrics], str]


class RunHealth:
    """Checks each step; a sign is reported once, later steps that show it are counted."""

    def __init__(self, compares_groups: bool) -> None:
        """`compares_groups`: advantages compare the samples of a prompt, so that equal scores teach nothing."""
        self.findings: dict[str, Finding] = {}
        self._signs = [sign for sign in SIGNS if compares_groups or sign.name != "flat_groups"]
        self._seen = dict.fromkeys((sign.name for sign in self._signs), 0)
        self._earlier: list[Metrics] = []

    def new_signs(self, step: int, metrics: Metrics) -> list[str]:
        """Messages of newly found signs."""
        told = []
        for sign in self._signs:
            holds = sign.holds(metrics, self._earlier)
            self._seen[sign.name] = self._seen[sign.name] + 1 if holds else 0
            if self._seen[sign.name] < sign.in_a_row:
                continue
            if (finding := self.findings.get(sign.name)) is not None:
                finding.steps += 1
            else:
                first = step - sign.in_a_row + 1
                self.findings[sign.name] = Finding(sign.name, sign.says(metrics), first, sign.in_a_row)
                told.append(f"warning, step {step}: {self.findings[sign.name].message}")
        old, recent = self._earlier[:-REMEMBERED], self._earlier[-REMEMBERED:]
        self._earlier = [*[one for one in old if not math.isnan(_entropy(one))][:1], *recent, metrics]
        return told


def _entropy(metrics: Metrics) -> float:
    return metrics.get("actor/entropy", metrics.get("actor/entropy_before", math.nan))


def _collapsed(metrics: Metrics, earlier: Sequence[Metrics]) -> bool:
    first = next((entropy for one in earlier if not math.isnan(entropy := _entropy(one))), math.nan)
    return _entropy(metrics) < ENTROPY_LEFT * first


def _explodes(metrics: Metrics, earlier: Sequence[Metrics]) -> bool:
    norms = [norm for one in earlier if (norm := one.get("actor/grad_norm", math.nan)) > 0]
    return len(norms) >= GRADIENT_STEPS and metrics.get("actor/grad_norm", math.nan) > GRADIENT_GROWTH * statistics.median(norms)


SIGNS = (
    Sign(
        "flat_groups",
        IN_A_ROW,
        lambda metrics, _: metrics.get("reward/flat_groups", 0.0) >= 1.0,
        lambda metrics: (
            f"in every group all samples have the same reward ({IN_A_ROW} steps in a row; mean score "
            f"{metrics.get('reward/mean', math.nan):.2f}): nothing can be learned from them. The prompts may be too hard or too easy, "
            "or the reward may misread the responses (roll-lite reward --responses shows)"
        ),
    ),
    Sign(
        "nothing_trains",
        IN_A_ROW,
        lambda metrics, _: metrics.get("rollout/samples") == 0.0 or metrics.get("masks/samples") == 1.0,
        lambda _: (
            f"no sample is left to train on ({IN_A_ROW} steps in a row): rollout.filter or algorithm.masks leaves all of them out "
            "(rollout/filtered_..., masks/...)"
        ),
    ),
    Sign(
        "truncated",
        IN_A_ROW,
        lambda metrics, _: metrics.get("rollout/truncated", 0.0) > TRUNCATED_ABOVE,
        lambda metrics: (
            f"{metrics['rollout/truncated']:.0%} of the responses were cut at max_tokens; raise domains.*.sampling.max_tokens, "
            "or see whether the model ever ends a response (its eos token, its chat template)"
        ),
    ),
    Sign(
        "entropy",
        IN_A_ROW,
        _collapsed,
        lambda metrics: (
            f"the policy's entropy has collapsed to {_entropy(metrics):.2g} nats: the samples of a prompt are nearly the same. "
            "A smaller learning rate, algorithm.entropy_coef or a KL term hold against it"
        ),
    ),
    Sign(
        "no_gradient",
        IN_A_ROW,
        lambda metrics, _: metrics.get("actor/grad_norm") == 0.0,
        lambda _: f"the actor's gradient is 0 ({IN_A_ROW} steps in a row): its weights do not change",
    ),
    Sign(
        "exploding_gradient",
        1,
        _explodes,
        lambda metrics: (
            f"the actor's gradient norm is {metrics['actor/grad_norm']:.3g}, over {GRADIENT_GROWTH:.0f} times its median so "
            "far; see samples/ of this step, and try a smaller learning rate"
        ),
    ),
)
