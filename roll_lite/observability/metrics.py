from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roll_lite.config.problems import or_nearest
from roll_lite.observability.metric_table import DERIVED, METRICS, Metric, Reduction

AT = re.compile(r"@\d+$")


def metric_of(name: str) -> Metric:
    """Declaration of a metric; `validation/pass@8` is declared as `validation/pass@k`."""
    metric = METRICS.get(name) or METRICS.get(AT.sub("@k", name))
    if metric is None:
        raise ValueError(f"metric {name!r} is not declared in observability/metric_table.py{or_nearest(name, METRICS)}")
    return metric


Series = tuple[str, str | None]

ALL_DOMAINS = ""
"""Label of values over all domains."""


@dataclass
class MetricSums:
    """Accumulated metrics: (sum, count) for means; other reductions ignore count. Picklable."""

    entries: dict[Series, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, value: float, count: float = 1.0, *, label: str | None = None, part: str = "") -> None:
        """Add a value; for a mean, the sum over `count` items.

        `label`: the value's domain, phase or role (see `Metric.by`), or ALL_DOMAINS. `part`: reward term or subset of the domain's samples
        with this value; the whole domain's value needs another call.
        """
        metric = metric_of(name)
        if label == ALL_DOMAINS and metric.by == "domain":
            self._put((name, None), float(value), count)
            return
        if (label is None) != (metric.by is None):
            wanted = f"needs a {metric.by} as label" if metric.by else "takes no label"
            raise ValueError(f"metric {name!r} {wanted}, got label={label!r}")
        value = float(value)
        self._put((name, f"{label}/{part}" if part else label), value, count)
        if not part and metric.by == "domain" and metric.reduction is not Reduction.LAST:
            self._put((name, None), value, count)

    def add_sums(self, sums: Mapping[str, float], domains: Sequence[str] = ()) -> None:
        """Add a loss function's sums for one optimizer step.

        Key `<name>#<i>` is the sum over `domains[i]`, `<name>` over all. For a mean, `sums` also holds the number of items
        (`Metric.denominators`); means over 0 items are skipped.
        """
        for key, value in sums.items():
            name, mark, number = key.partition("#")
            metric = metric_of(name)
            label = domains[int(number)] if mark else None
            if metric.denominators:
                holder = next((f"{count}{mark}{number}" for count in metric.denominators if f"{count}{mark}{number}" in sums), None)
                assert holder is not None, f"{key} came without its count: one of {metric.denominators}"
                if sums[holder] > 0:
                    self.add(name, value, sums[holder], label=label)
            else:
                self.add(name, value, label=label)

    def _put(self, series: Series, value: float, count: float) -> None:
        metric, old = metric_of(series[0]), self.entries.get(series)
        if old is None or metric.reduction is Reduction.LAST:
            self.entries[series] = (value, count)
        elif metric.reduction in (Reduction.MEAN, Reduction.SUM):
            self.entries[series] = (old[0] + value, old[1] + count)
        else:
            # NaN wins: otherwise the maximum would hide a broken rank.
            pick = max if metric.reduction is Reduction.MAX else min
            self.entries[series] = (math.nan if math.isnan(old[0]) or math.isnan(value) else pick(old[0], value), count)

    def merge(self, other: MetricSums) -> None:
        """Add the metrics of another rank or a later step; with reduction LAST, those of `other` win."""
        for series, (value, count) in other.entries.items():
            self._put(series, value, count)

    def values(self) -> dict[str, float]:
        """Return {name in files and trackers: value}, with derived metrics, without means over no items. A part's name is
        `domain/<domain>/<part>/<name>`."""
        read: dict[Series, float] = {}
        for series, (value, count) in self.entries.items():
            if metric_of(series[0]).reduction is not Reduction.MEAN:
                read[series] = value
            elif count > 0:
                read[series] = value / count
        shown = {series: value for series, value in read.items() if metric_of(series[0]).shown}
        labels = dict.fromkeys(label for _, label in read)
        for name, derived in DERIVED.items():
            for label in labels:
                inputs = [read.get((key, label)) for key in derived.inputs]
                if None not in inputs:
                    shown[(name, label)] = derived.compute(*inputs)
        flat = {}
        for (name, label), value in shown.items():
            if label is None:
                flat[name] = value
            elif name in DERIVED or metric_of(name).by == "domain":
                flat[f"domain/{label}/{name}"] = value
            else:
                flat[f"{name}/{label}"] = value
        return flat
