"""Engines that do not come up: they say why, and nothing of them stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_harness import SHARPNESS, Harness, Make, make_strategy, require
from left_behind import Traces, nothing_left_behind
from support_models import make_tiny_model

from roll_lite.config.schema.models import ModelConfig
from roll_lite.distributed.strategy.inference.life import EngineDead
from roll_lite.distributed.strategy.vllm.compat.engine import VllmEngine


@pytest.mark.parametrize(("folder", "said"), [("missing", r"no such folder: .*missing"), ("empty", r"no config\.json in .*empty")])
async def test_a_folder_without_a_model(make: Make, tmp: Path, folder: str, said: str) -> None:
    (tmp / "empty").mkdir()
    with nothing_left_behind(tmp / "t"), pytest.raises(ValueError, match=rf"model\.path: {said}"):
        await make_strategy(make, ModelConfig(path=tmp / folder, dtype="float32"), 512).initialize()


async def test_a_model_whose_weights_are_no_safetensors(make: Make, tmp: Path) -> None:
    make_tiny_model(tmp / "m", "qwen2", True, sharpness=SHARPNESS)
    (tmp / "m" / "model.safetensors").rename(tmp / "m" / "pytorch_model.bin")
    strategy = make_strategy(make, ModelConfig(path=tmp / "m", dtype="float32"), 512)
    with nothing_left_behind(tmp / "t"), pytest.raises(ValueError, match=r"model\.path: .*: no model\.safetensors"):
        await strategy.initialize()
    assert not (await strategy.health()).alive
    await strategy.shutdown()


@pytest.mark.slow
async def test_vllm_that_fails_once_it_has_started(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("vllm")
    make_tiny_model(tmp / "m", "qwen2", True, sharpness=SHARPNESS)
    strategy = make_strategy("vllm", ModelConfig(path=tmp / "m", dtype="float32"), 512)
    seen = []

    with nothing_left_behind(tmp / "t") as traces:

        async def refuse(*_: Any) -> None:
            seen.extend([len(traces.processes()), len(traces.folders())])
            raise RuntimeError("no version today")

        monkeypatch.setattr(VllmEngine, "_set_version", refuse)
        with pytest.raises(RuntimeError, match="no version today"):
            await strategy.initialize()
    assert all(seen) and not (await strategy.health()).alive


@pytest.mark.slow
async def test_sglang_whose_scheduler_fails_says_why(tmp: Path) -> None:
    require("sglang")
    with (
        nothing_left_behind(tmp / "t"),
        pytest.raises(EngineDead, match="while it started: ValueError: Invalid attention backend: nonsense"),
    ):
        await Harness.start(tmp / "m", make="sglang", engine_args={"attention_backend": "nonsense"})


@pytest.mark.slow
async def test_sglang_that_is_called_off_while_it_starts(tmp: Path) -> None:
    """Its processes have just been started, and do not watch one another yet."""
    require("sglang")
    with nothing_left_behind(tmp / "t") as traces:
        starting = asyncio.create_task(Harness.start(tmp / "m", make="sglang"))
        while len(_with_spawned(traces)) < 2:
            await asyncio.sleep(0.1)
            assert not starting.done()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


def _with_spawned(traces: Traces) -> list[str]:
    lines = [" ".join(process.cmdline()) for process in traces.processes()]
    return [line for line in lines if "spawn_main" in line]
