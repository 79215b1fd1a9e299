"""Run every tiny recipe to its end and see whether it has learned: python examples/run_recipes.py [NAME ...] [key=value ...]

Each is a run of its own, one after the other; what it leaves is under runs/recipes, or run_dir. Ends with 1 where the held-out accuracy of
one has not risen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

RISEN = 0.10
"""Held-out accuracy, over all domains, that a recipe has to gain: far more than the noise of 300 samples."""
CONFIGS = Path("examples/configs")
NO_RECIPES = ("tiny_base",)


def recipes() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("tiny_*.yaml") if path.stem not in NO_RECIPES)


def run(name: str, overrides: list[str]) -> tuple[float | None, float | None, float]:
    """Accuracy before and after (None if the run failed), and seconds."""
    run_dir = next((Path(one.removeprefix("run_dir=")) for one in overrides if one.startswith("run_dir=")), Path("runs/recipes"))
    started = time.monotonic()
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", name, f"run_dir={run_dir}", *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        print(done.stdout)
        return None, None, seconds
    accuracy = json.loads((run_dir / "latest" / "summary.json").read_text())["accuracy"]["overall"]
    return accuracy["before"], accuracy["after"], seconds


def main(arguments: list[str]) -> int:
    names = [argument for argument in arguments if "=" not in argument] or recipes()
    overrides = [argument for argument in arguments if "=" in argument]
    failed = []
    print(f"{'recipe':28} {'before':>7} {'after':>7} {'seconds':>8}")
    for name in names:
        before, after, seconds = run(name, overrides)
        if before is None or after is None or after < before + RISEN:
            failed.append(name)
        shares = (f"{100 * share:6.1f}%" if share is not None else f"{'-':>7}" for share in (before, after))
        print(f"{name:28} {' '.join(shares)} {seconds:8.0f}{'  has not risen' if name in failed else ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
