"""The strategies that hold a model to train or to run forward, by the name in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roll_lite.distributed.strategy.base import ForwardStrategy, ModelSpec


def _megatron(spec: ModelSpec) -> ForwardStrategy:
    from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

    return MegatronStrategy(spec)


def _hf(spec: ModelSpec) -> ForwardStrategy:
    from roll_lite.distributed.strategy.hf import HfRewardStrategy

    return HfRewardStrategy(spec)


STRATEGIES: Mapping[str, Callable[[ModelSpec], ForwardStrategy]] = {"megatron": _megatron, "hf": _hf}
"""Each is imported only where it runs."""


def build_model(spec: ModelSpec) -> ForwardStrategy:
    """The one place where the strategy is chosen."""
    return STRATEGIES[spec.strategy.name](spec)
