"""On a GPU that is not there: Megatron-Core as it is, our model with and without experts, log-probs, values, losses, and weights on their
way to engines; a reward model of transformers. Nothing is left on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_models import Family, make_tiny_model, make_tiny_reward_model

TESTS = Path(__file__).resolve().parents[3]


PATHS = [str(TESTS.parent), str(TESTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
TP2, CP2, EP2 = {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}, {"expert_parallel": 2}
LAYOUTS = [
    pytest.param("qwen3", TP2, id="TP2"),
    pytest.param("qwen3", CP2, id="CP2", marks=pytest.mark.nightly),
    pytest.param("qwen3_moe", EP2, id="EP2"),
    pytest.param("qwen3_moe", TP2, id="experts TP2", marks=pytest.mark.nightly),
]


def assert_all_on_gpu(folder: Path, layout: dict[str, Any] | None) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fake_gpu.py")), str(folder), json.dumps(layout)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.endswith("all on cuda:0\n"), done.stdout + done.stderr


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_a_forward_pass_its_loss_and_the_export_of_weights_stay_on_the_gpu(tmp_path: Path, family: Family, layout: dict[str, Any]) -> None:
    assert_all_on_gpu(make_tiny_model(tmp_path / "m", family, hidden=128), layout)


def test_a_reward_model_of_transformers_scores_on_the_gpu(tmp_path: Path) -> None:
    assert_all_on_gpu(make_tiny_reward_model(tmp_path / "m"), None)


MIXED = """
import torch, fake_gpu
with fake_gpu.WithoutDevice():
    on_gpu, scalar, on_host = torch.empty(3, device="cuda"), torch.empty((), device="cuda"), torch.empty(3)
    for mixes in (lambda: on_gpu + on_host, lambda: torch.stack([scalar, on_host.sum()]), lambda: torch.cat([on_gpu, on_host])):
        try:
            mixes()
        except (AssertionError, RuntimeError) as error:
            assert "device" in str(error), error
        else:
            raise SystemExit("tensors of two devices were taken")
    assert torch.stack([scalar, scalar]).device.type == "cuda"
"""


def test_the_fake_refuses_what_lies_on_two_devices() -> None:
    done = subprocess.run([sys.executable, "-c", MIXED], env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
