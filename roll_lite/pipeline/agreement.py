"""Check in every step that engines and trainer compute equal log-probs: otherwise a run silently trains on another policy's samples."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from roll_lite.algorithms.token_metrics import SampleSums
from roll_lite.config.arithmetic import generates, infer_dtype, trains
from roll_lite.config.keep_mask import is_truncated
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.proto import DataProto
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.pipeline.clusters import Model
from roll_lite.workers.model import ModelWorker

logger = logging.getLogger(__name__)

DUMPS = """The dumps (replay.path) were sampled from another model than model.path, or at another temperature. To train on another policy's
samples, use algorithm.old_log_probs: rollout or algorithm.mismatch_correction, and raise rollout.max_mismatch; null allows any."""
ENGINES = """Likely causes:
- config.json holds something that the trainer and the engine read differently (RoPE, tied embeddings, the kind of attention)
- actor_infer.strategy.engine_args change the model or its precision (hf_overrides, kv_cache_dtype)
- the weights in the engine are not the trainer's: see whether the run ends earlier with weight_sync.verify: full
If engines are meant to differ that much, raise rollout.max_mismatch; null allows any difference."""
UPDATED = """The engine's weights have likely gone wrong in that update; weight_sync.verify: full compares all of them after each one.
If engines are meant to differ that much, """
RAISE = "raise rollout.max_mismatch; null allows any difference."
NULL = "set rollout.max_mismatch: null, which allows any difference; a higher number would not raise this limit."
BOUND = {"float32": 0.01, "bfloat16": 0.2}
"""Maximum mean log-prob difference in nats for `rollout.max_mismatch: auto`, by the lower precision of engine and trainer."""
FLOOR = {"float32": 1e-3, "bfloat16": 0.03}
"""Mean log-prob difference in nats, by precision, that counts as rounding: limits from earlier steps or other engines are never lower."""
DRIFT = 0.1
"""Nats that each weight update since a sample's generation may add to `rollout.max_mismatch`. Usual: 0.006 to 0.03; after Adam's first
step, 0.07."""
STALE_FLOOR = 0.05
"""FLOOR for samples of older weights, in any precision."""
FACTOR, STALE_FACTOR = 5.0, 10.0
"""Limits of an engine's mean log-prob difference: FACTOR (samples of older weights: STALE_FACTOR) times the median of earlier steps, and
times the other engines' mean."""
LEAST_TOKENS = {"float32": 20, "bfloat16": 1000}
"""Minimum tokens of an engine for a comparison: in bfloat16, single tokens differ much."""
LEAST_STALE_TOKENS = 200
"""LEAST_TOKENS for samples of older weights, in any precision."""
LASTING_STEPS, SUDDEN = 3, 2.0
"""Log-probs of older weights' samples also differ because the policy has learned since: after a collapse, up to seven times the limit for
two steps. They end a run only after LASTING_STEPS steps in a row beyond a limit (more for older weights: one large update shows in
several), or SUDDEN nats once."""
LEAST_STEPS, LEAST_STALE_STEPS, MOST_STEPS = 1, 2, 50
"""Number of earlier steps whose median FACTOR multiplies: minimum, minimum for older weights' samples, maximum."""
Age = tuple[int, int]
"""Age of a sample: weight updates since its (oldest, newest) token was generated."""
CURRENT = (0, 0)


class DifferentModels(RuntimeError):
    """Error: log-probs of engine and trainer differ, or replicas hold different weights."""


class EnginesDiffer(DifferentModels):
    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


def compare_replicas(model: Model[Any], step: int) -> None:
    """Raise DifferentModels if weights of data parallel replicas differ."""
    if model.ranks.data_size == 1:
        return
    with model.loaded((StateGroup.WEIGHTS,)):
        found = model.ranks.all(ModelWorker.replica_checksums)
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, checksums in enumerate(found):
        for name, digest in checksums.items():
            ranks.setdefault(name, {}).setdefault(digest, []).append(rank)
    wrong = {name: list(by_digest.values()) for name, by_digest in ranks.items() if len(by_digest) > 1}
    for name, groups in wrong.items():
        role = model.ranks.name
        held = " and ".join(
            f"rank{'s' * (len(group) > 1)} {', '.join(f'{rank}{WATCH.where(role, rank)}' for rank in group)}" for group in groups
        )
        raise DifferentModels(
            f"{role}: data-parallel replicas hold different weights after step {step}: {held} differ in {name}, "
            f"{len(wrong)} of {len(ranks)} tensors differ; memory or a device of one of them is likely faulty"
        )


class Agreement:
    """Compares each engine's log-probs with the trainer's, by Age of the samples."""

    def __init__(self, config: RunConfig) -> None:
        self._is_live = generates(config)
        # Without a keep mask, log-probs of truncated sampling belong to another distribution, by design.
        self._left_out = {name for name, one in config.domains.items() if is_truncated(one.sampling) and not config.rollout.keep_mask}
        self._compares = len(self._left_out) < len(config.domains)
        precision = "float32" if {infer_dtype(config), config.model.dtype} == {"float32"} else "bfloat16"
        self._floor, self._least_tokens = FLOOR[precision], LEAST_TOKENS[precision]
        bound = config.rollout.max_mismatch if trains(config) else None
        # Dumps may come from a run of another precision.
        self._bound = BOUND[precision if self._is_live else "bfloat16"] if bound == "auto" else bound
        self._is_first, self._has_said = True, False
        self._accepted: int | None = None
        self._past: dict[str, list[float]] = {}
        """{Age as text, such as "0 0" (JSON has no tuples as keys): mean log-prob difference in each earlier step}."""
        self._exceeded: dict[str, int] = {}
        """{age and engine as text, such as "0 0 1": number of comparisons in a row in which the engine exceeded a limit}."""

    def accept(self, version: int) -> None:
        self._accepted, self._is_first = version, False

    def check(self, version: int, rows: DataProto, found: Iterable[SampleSums]) -> None:
        """Raise EnginesDiffer if log-probs differ too much. `version`: of the trainer's weights. `found`: by rank, {sample number: (sum of
        absolute differences, tokens)}."""
        if version == self._accepted:
            self._is_first = False
        if self._bound is None or version == self._accepted or not (self._is_live or self._is_first):
            return
        places = self._places(version, rows, {sample: sums for part in found for sample, sums in part.items()})
        if not self._has_said and self._left_out:
            logger.warning(
                "rollout.max_mismatch: engines and trainer are not compared on samples of %s: sampling is truncated there, and its "
                "log-probs are those of another distribution; rollout.keep_mask: true makes them comparable",
                ", ".join(sorted(self._left_out)),
            )
        if not self._has_said and self._compares and not places:
            logger.warning("rollout.max_mismatch: engines and trainer are not compared yet: the actor gave no log-probs in this step")
        self._has_said = True
        if not places:
            return
        # Updates since then also move older weights' samples, which a resumed run may have at once.
        first = [sums for (_, age), sums in places.items() if age == CURRENT or not self._is_live] if self._is_first else []
        if first and (whole := _mean(first)) > self._bound:
            raise EnginesDiffer(
                f"engines and trainer disagree about the tokens of the first batch: their log-probs differ by {whole:.3g} nats "
                f"on average, rollout.max_mismatch allows {self._bound:g}: they do not hold the same model\n"
                f"{ENGINES if self._is_live else DUMPS}",
                version,
            )
        self._is_first = self._is_first and not first
        if not self._is_live:
            return
        for age in sorted({age for _, age in places}):
            least = self._least_tokens if age == CURRENT else max(self._least_tokens, LEAST_STALE_TOKENS)
            engines = {engine: sums for (engine, of_age), sums in places.items() if of_age == age and sums[1] >= least}
            if engines:
                self._compare(version, age, engines, self._bound)

    def _places(self, version: int, rows: DataProto, sums: SampleSums) -> dict[tuple[int, Age], tuple[float, int]]:
        places: dict[tuple[int, Age], tuple[float, int]] = {}
        engines, newest = (rows.tensor(name).tolist() if name in rows else [-1] * len(rows) for name in ("engine", "max_version"))
        samples, oldest = rows.tensor("sample").tolist(), rows.tensor("min_version").tolist()
        for sample, domain, engine, old, new in zip(samples, rows.objects("domain"), engines, oldest, newest, strict=True):
            total, tokens = sums.get(sample, (0.0, 0))
            if tokens and domain not in self._left_out and not math.isnan(total):  # NaN: its update is skipped
                place = engine, (version - old, version - new)
                before = places.get(place, (0.0, 0))
                places[place] = before[0] + total, before[1] + tokens
        return places

    def _compare(self, version: int, age: Age, engines: Mapping[int, tuple[float, int]], bound: float) -> None:
        is_current, past = age == CURRENT, self._past.setdefault(f"{age[0]} {age[1]}", [])
        floor, factor, least = self._floor, FACTOR, LEAST_STEPS
        if not is_current:
            floor, factor, least = max(STALE_FLOOR, self._floor), STALE_FACTOR, LEAST_STALE_STEPS
        usual: list[tuple[float, int]] = []
        for engine, (total, tokens) in engines.items():
            mean, others = total / tokens, [sums for other, sums in engines.items() if other != engine]
            limits = {"rollout.max_mismatch": bound} if is_current else {}
            if len(past) >= least:
                limits[f"{factor:g} times the median of the last {len(past)} step(s)"] = max(floor, factor * statistics.median(past))
            if others:
                limits[f"{factor:g} times that of the other engines"] = max(floor, factor * _mean(others))
            if not is_current:
                limits[f"rollout.max_mismatch, and {DRIFT:g} for each of {age[0]} update(s) since"] = bound + DRIFT * age[0]
            exceeded = {why: limit for why, limit in limits.items() if mean > limit}
            place = f"{age[0]} {age[1]} {engine}"
            if not exceeded:
                self._exceeded.pop(place, None)
                usual.append((total, tokens))
                continue
            why, limit = next(iter(exceeded.items()))
            steps = self._exceeded[place] = self._exceeded.get(place, 0) + 1
            if is_current or steps >= max(LASTING_STEPS, age[0] + 1) or mean >= SUDDEN:
                who = f"actor_infer[{engine}]{WATCH.where('actor_infer', engine)}" if engine >= 0 else "several engines"
                remedy = RAISE if all(one.startswith("rollout.max_mismatch") for one in exceeded) else NULL
                lasting = f", in {steps} steps in a row" if steps > 1 else ""
                raise EnginesDiffer(
                    f"{who}, weights of version {version - age[1]}: log-probs of {tokens} tokens differ from the trainer's by "
                    f"{mean:.3g} nats on average, at most {limit:.3g} is allowed ({why}){lasting}\n{UPDATED}{remedy}",
                    version,
                )
        if usual:
            past.append(_mean(usual))
            del past[:-MOST_STEPS]

    def state_dict(self) -> dict[str, Any]:
        return {"past": self._past, "exceeded": self._exceeded, "is_first": self._is_first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._past = {age: list(means) for age, means in state["past"].items()}  # a copy: `state` may be loaded again
        self._exceeded, self._is_first = dict(state.get("exceeded", {})), state["is_first"]  # older checkpoints lack the former


def _mean(sums: Iterable[tuple[float, int]]) -> float:
    total, tokens = (sum(part) for part in zip(*sums, strict=True))
    return total / tokens
