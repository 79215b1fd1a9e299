"""Warn of signs of failing training, such as truncated responses or a collapsed entropy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Metrics = Mapping[str, float]

IN_A_ROW = 3
"""Consecutive steps that must show a problem before it is reported."""
GROUPS = 12
"""Minimum sample groups, over a problem's consecutive steps, to report a single domain. In fewer groups, equal scores may be chance."""
TRUNCATED_ABOVE = 0.5
ENTROPY_LEFT = 0.02
"""Fraction of the first step's entropy below which the entropy counts as collapsed."""
GRADIENT_GROWTH = 100.0
"""Multiple of the earlier steps' median gradient norm above which the gradient counts as exploding."""
GRADIENT_STEPS = 5
REMEMBERED = 50


@dataclass
class Finding:
    sign: str
    """Name of the training problem, such as `truncated`; `math/truncated` if only the domain `math` has it."""
    message: str
    first_step: int
    steps: int = 1


@dataclass(frozen=True)
class Sign:
    name: str
    holds: Callable[[Metrics, Sequence[Metrics]], bool]
    """Test of a step's metrics. Second argument: metrics of the first step with an entropy and of the latest steps."""
    says: Callable[[Metrics], str]
    by_domain: bool = False
    in_a_row: int = IN_A_ROW


class RunHealth:
    """Finds signs of failing training (SIGNS) in the metrics. A sign is reported once, then counted."""

    def __init__(self, compares_groups: bool, domains: Sequence[str] = ()) -> None:
        """`compares_groups`: warn if all groups have equal rewards (no gradient with GRPO). `domains`: if several, some signs are also
        checked in each."""
        self.findings: dict[str, Finding] = {}
        signs = [sign for sign in SIGNS if compares_groups or sign.name != "flat_groups"]
        each = [(domain, sign) for sign in signs if sign.by_domain for domain in domains if len(domains) > 1]
        self._signs = [*(("", sign) for sign in signs), *each]
        self._seen = dict.fromkeys(self._signs, (0, 0.0))
        self._earlier: list[Metrics] = []

    def new_signs(self, step: int, metrics: Metrics) -> list[str]:
        told = []
        for domain, sign in self._signs:
            start = f"domain/{domain}/" if domain else ""
            of_place = {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
            if domain and (sign.name in self.findings or not of_place.get("rollout/groups")):
                continue  # reported for the whole batch, or the domain has no sample in this step
            steps, groups = self._seen[domain, sign]
            holds = sign.holds(of_place, self._earlier)
            steps, groups = (steps + 1, groups + of_place.get("rollout/groups", 0.0)) if holds else (0, 0.0)
            self._seen[domain, sign] = steps, groups
            if steps < sign.in_a_row or (domain and groups < GROUPS):
                continue
            name = f"{domain}/{sign.name}" if domain else sign.name
            if (finding := self.findings.get(name)) is not None:
                finding.steps += 1
            else:
                said = f"domain {domain}: {sign.says(of_place)}" if domain else sign.says(of_place)
                self.findings[name] = Finding(name, said, step - steps + 1, steps)
                told.append(f"warning, step {step}: {said}")
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
        lambda metrics, _: metrics.get("reward/flat_groups", 0.0) >= 1.0,
        lambda metrics: (
            f"in every group all samples have the same reward ({IN_A_ROW} steps in a row; mean score "
            f"{metrics.get('reward/mean', math.nan):.2f}): nothing can be learned from them. The prompts may be too hard or too easy, "
            "or the reward may misread the responses (roll-lite reward --responses shows)"
        ),
        by_domain=True,
    ),
    Sign(
        "nothing_trains",
        lambda metrics, _: metrics.get("rollout/samples") == 0.0 or metrics.get("masks/samples") == 1.0,
        lambda _: (
            f"no sample is left to train on ({IN_A_ROW} steps in a row): rollout.filter or algorithm.masks leaves all of them out "
            "(rollout/filtered_..., masks/...)"
        ),
    ),
    Sign(
        "truncated",
        lambda metrics, _: metrics.get("rollout/truncated", 0.0) > TRUNCATED_ABOVE,
        lambda metrics: (
            f"{metrics['rollout/truncated']:.0%} of the responses were cut at max_tokens; raise domains.*.sampling.max_tokens, "
            "or see whether the model ever ends a response (its eos token, its chat template)"
        ),
        by_domain=True,
    ),
    Sign(
        "entropy",
        _collapsed,
        lambda metrics: (
            f"the policy's entropy has collapsed to {_entropy(metrics):.2g} nats: the samples of a prompt are nearly the same. "
            "A smaller learning rate, algorithm.entropy_coef or a KL term hold against it"
        ),
    ),
    Sign(
        "no_gradient",
        lambda metrics, _: metrics.get("actor/grad_norm") == 0.0,
        lambda _: f"the actor's gradient is 0 ({IN_A_ROW} steps in a row): its weights do not change",
    ),
    Sign(
        "exploding_gradient",
        _explodes,
        lambda metrics: (
            f"the actor's gradient norm is {metrics['actor/grad_norm']:.3g}, over {GRADIENT_GROWTH:.0f} times its median so "
            "far; see samples/ of this step, and try a smaller learning rate"
        ),
        in_a_row=1,
    ),
)
