"""Looks into the dumps of a run: with pandas at every sample, with roll_lite at those that trained.

    python examples/start_rlvr_pipeline.py --config-name tiny_grpo rollout.dump=true steps=3
    python examples/read_dumps.py runs/latest

docs/replay.md lists the columns. pandas is not among roll_lite's own dependencies: `pip install pandas` where it is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from roll_lite.data.dumps import load_dump


def samples(dumps: list[Path]) -> pd.DataFrame:
    """All samples of a run, with failed and filtered ones and greedy baselines."""
    return pd.concat([pd.read_parquet(path).assign(step=int(path.stem.removeprefix("step_"))) for path in dumps], ignore_index=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, runs/latest for instance")
    dumps = sorted((parser.parse_args().run / "dumps").glob("step_*.parquet"))
    if not dumps:
        parser.error("this run has no dumps; start it with rollout.dump=true")

    frame = samples(dumps)
    print(frame.groupby(["domain", "outcome"]).agg(samples=("group", "size"), score=("score", "mean"), tokens=("response_length", "mean")))
    solved = frame[~frame["baseline"]].groupby(["domain", "prompt"])["correct"].mean().sort_values()
    print(f"\nhardest prompts\n{solved.head(3).to_string()}")
    worst = frame.loc[frame["score"].idxmin()]
    print(f"\na sample with score {worst['score']:g}: {worst['prompt']!r} -> {worst['response']!r} (answer {worst['reference_answer']})")

    batch = load_dump(dumps[-1])  # a DataProto: what a training rank sees of it
    log_probs, mask = batch.ragged("rollout_log_probs"), batch.ragged("response_mask")
    chosen = sum(int(row[1:].sum()) for row in mask.rows())
    print(f"\n{dumps[-1].name}: {len(batch)} samples trained, columns {', '.join(batch.keys())}")
    print(f"mean log-prob of the {chosen} tokens that the policy chose: {float(log_probs.values.sum()) / chosen:.3f}")


if __name__ == "__main__":
    main()
