"""On a GPU that is not there: Megatron-Core as it is, our model, log-probs, values, losses, and weights on their way to engines. Nothing is
left on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_models import make_tiny_model

TESTS = Path(__file__).resolve().parents[3]


PATHS = [str(TESTS.parent), str(TESTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
TP2, CP2 = {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}


@pytest.mark.parametrize("layout", [pytest.param(TP2, id="TP2"), pytest.param(CP2, id="CP2", marks=pytest.mark.nightly)])
def test_a_forward_pass_its_loss_and_the_export_of_weights_stay_on_the_gpu(tmp_path: Path, layout: dict[str, Any]) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3", hidden=128)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fake_gpu.py")), str(folder), json.dumps(layout)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.endswith("all on cuda:0\n"), done.stdout + done.stderr


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
