"""What the hosting process tells the engine's process first."""

from __future__ import annotations

from dataclasses import dataclass

from roll_lite.config.schema import ModelConfig, SglangStrategyConfig


@dataclass(frozen=True)
class EngineSpec:
    model: ModelConfig
    strategy: SglangStrategyConfig
    max_model_len: int
    seed: int
    cuda: bool
    scratch: str
