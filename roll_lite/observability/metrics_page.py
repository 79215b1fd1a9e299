"""docs/metrics.md from the table: `python -m roll_lite.observability.metrics_page docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from roll_lite.observability.metric_table import DERIVED, METRICS

INTRODUCTION = """# Metrics

Generated from `roll_lite/observability/metric_table.py` by `python -m roll_lite.observability.metrics_page docs/metrics.md`.

A *mean* is a sum over a count of everything the step saw (samples, tokens, optimizer steps), never an average of averages;
*last* is the newest value. A metric by domain appears as `domain/<domain>/<name>` and, but for *last*, over all domains as
`<name>`. One by phase or role appears as `<name>/<phase>`. The losses and their gradients are explained in [algorithms.md](algorithms.md).

## Held-out prompts

```yaml
validation:
  every: 10
  samples_per_prompt: 16
  sampling: {temperature: 0.6, top_p: 0.95, max_tokens: 4096}
domains:
  math:
    data: {validation: math500.jsonl, report_by: level}   # by level, too: domain/math/level:5/validation/...
```

The sampling of held-out prompts has a temperature of its own, 1 by default and 0 for greedy; what else is not given is the domain's.

With n samples for each prompt, k is 2, 4, 8, ... up to n, and n itself. k = 1 is `validation/accuracy` and `validation/reward`.

- `pass@k`: is one of k samples correct? The mean over all choices of k among the n, 1 - C(n-c, k) / C(n, k) where c of them are correct
  (Chen et al. 2021).
- `best@k`: the highest score of k samples, on average over all choices. Where scores are 0 and 1, it is pass@k.
- `maj@k`: is the most frequent answer of k samples correct? Where several are equally frequent, the mean of them. It is the mean over
  n // k votes: samples 0 to k-1, k to 2k-1, and so on.

Which answers are equal is the reward's say (`Score.answer`, [rewards.md](rewards.md)). `math`, `choice` and `exact` read answers; programs,
judges, reward models and instructions have none to compare: a domain with such a reward has no maj@k. A sample without an answer does
not vote, and a vote of nobody is wrong. Prompts of which fewer than k samples are left, because others failed, are not in `@k`.

The console shows the largest k, `metrics.jsonl` and the trackers all of them, `summary.json` under `validation` those of the first and of
the last validation. Trackers that allow no `@` or `:` in a name put another sign in its place.

## Where they go

```yaml
trackers:
  - {name: jsonl}                                     # metrics.jsonl in the run's folder
  - {name: tensorboard}                               # tensorboard/ there
  - {name: wandb, args: {project: mine, mode: offline}}            # args of wandb.init
  - {name: mlflow, args: {tracking_uri: "sqlite:///mlflow.db"}}    # and experiment_name, run_name
  - {name: swanlab, args: {project: mine, mode: local}}            # args of swanlab.init
  - {name: my_package.my_module.MyTracker, args: {}}  # a subclass of roll_lite.observability.trackers.Tracker, made with (run, **args)
```

The three services are optional dependencies: `roll_lite[wandb]`, `roll_lite[mlflow]`, `roll_lite[swanlab]`. They get the metrics and the
configuration. Values of environment variables whose names say that they are secrets are taken out of it, and no command line, source,
console output or machine data is collected (`settings` among wandb's args changes that). A resumed run goes on in the tracker's run of
the one before it: `trackers.json` in the run's folder keeps the ids. A tracker that cannot start ends the run at once; one that fails
later is told and left out, and the run goes on.
"""


def page() -> str:
    sections: dict[str, list[str]] = {}

    def row(name: str, reduction: str, by: str | None, unit: str, description: str) -> None:
        cells = (f"`{name}`", reduction, by or "", unit, description.replace("|", "\\|"))
        sections.setdefault(name.split("/")[0], []).append("| " + " | ".join(cells) + " |")

    for name, metric in METRICS.items():
        if metric.shown:
            row(name, metric.reduction.value, metric.by, metric.unit, metric.description)
    for name, derived in DERIVED.items():
        row(name, "derived", METRICS[derived.inputs[0]].by, derived.unit, derived.description)
    head = "| Name | Reduction | By | Unit | What it says |\n|---|---|---|---|---|\n"
    return INTRODUCTION + "".join(f"\n## {title}\n\n{head}" + "\n".join(rows) + "\n" for title, rows in sections.items())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
