"""Strategies that hold a model, by the name in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roll_lite.distributed.strategy.base import ForwardStrategy, ModelSpec


def _megatron(spec: ModelSpec) -> ForwardStrategy:
    from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

    return MegatronStrategy(spec)


def _hf(spec: ModelSpec) -> ForwardStrategy:
    from roll_lite.distributed.strategy.hf import HfRewardStrategy

    return HfRewardStrategy(spec)


@dataclass(frozen=True)
class ModelStrategy:
    build: Callable[[ModelSpec], ForwardStrategy]
    connects_ranks: bool
    """A process group spans all ranks: none can be replaced alone."""


STRATEGIES: Mapping[str, ModelStrategy] = {"megatron": ModelStrategy(_megatron, True), "hf": ModelStrategy(_hf, False)}


def build_model(spec: ModelSpec) -> ForwardStrategy:
    return STRATEGIES[spec.strategy.name].build(spec)
