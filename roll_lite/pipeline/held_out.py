"""Validation metrics, computed from the rows of held-out samples."""

from __future__ import annotations

import numpy as np

from roll_lite.algorithms.at_k import AT_K, SampledPrompts, every_k
from roll_lite.data.proto import DataProto
from roll_lite.observability.metrics import MetricSums


def held_out_metrics(rows: DataProto, samples_per_prompt: int) -> MetricSums:
    """Metrics by domain and by its reported parts: means over samples, and pass@k, best@k, maj@k over prompts.

    Prompts with fewer than k samples, because some failed, do not count for @k.
    """
    sums = MetricSums()
    for domain, own in rows.group_by("domain").items():
        _domain(sums, own, samples_per_prompt, str(domain))
    return sums


def _domain(sums: MetricSums, rows: DataProto, samples_per_prompt: int, domain: str) -> None:
    correct, scores = rows.tensor("correct").double().numpy(), rows.tensor("score").double().numpy()
    means = {"accuracy": correct, "reward": scores, "response_tokens": rows.tensor("response_length").double().numpy()}
    sampled = SampledPrompts(rows.tensor("group").numpy(), correct, scores, rows.tensor("answer").numpy())
    worths = {f"{name}@{k}": of(sampled, k) for k in every_k(samples_per_prompt) for name, of in AT_K.items()}
    numbers: dict[str, int] = {}
    part = np.array([numbers.setdefault(name, len(numbers)) for name in rows.objects("part").tolist()])
    everything = np.ones(len(rows), dtype=bool)
    for name, of_samples in [("", everything), *((name, part == number) for name, number in numbers.items() if name)]:
        of_prompts = of_samples[sampled.first]
        for metric, values in means.items():
            _add(sums, metric, values[of_samples], domain, name)
        for metric, values in worths.items():
            known = values[of_prompts]
            _add(sums, metric, known[~np.isnan(known)], domain, name)


def _add(sums: MetricSums, metric: str, values: np.ndarray, domain: str, part: str) -> None:
    if len(values):
        sums.add(f"validation/{metric}", float(values.sum()), len(values), label=domain, part=part)
