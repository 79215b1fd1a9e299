"""The README's own reward, looked up as the command line does, in a fresh interpreter: nothing is imported yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("reward", "code", "said"),
    [
        ("examples.domains.reverse.score", 0, ""),
        ("examples.domains.reverse.scor", 2, "did you mean 'score'?"),
        ("examples.domains.nope.score", 2, "there is no module 'nope' in examples.domains"),
    ],
)
def test_a_reward_in_folders_without_init_files(reward: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "roll_lite.cli", "check", "--config-name", "tiny_grpo", f"domains.add.reward.type={reward}"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == code, checked.stderr
    assert said in checked.stderr and "Traceback" not in checked.stderr
