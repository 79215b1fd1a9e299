"""The inference engines by the name of their strategy: how a replica is built, which arguments are not the user's.

Nothing here imports an engine, nor torch before one is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from roll_lite.config.problems import Problem
from roll_lite.config.schema import (
    EngineStrategyConfig,
    RunConfig,
    ScriptedStrategyConfig,
    SglangStrategyConfig,
    VllmStrategyConfig,
)
from roll_lite.distributed.strategy.inference.settings import OWN_ARGUMENT
from roll_lite.distributed.strategy.sglang.compat import settings as sglang
from roll_lite.distributed.strategy.vllm.compat import judge_server
from roll_lite.distributed.strategy.vllm.compat import settings as vllm

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.base import EngineSpec, InferenceStrategy

OWN_ARGUMENTS: Mapping[str, tuple[str, ...]] = {"vllm": vllm.OWN_ARGUMENTS, "sglang": sglang.OWN_ARGUMENTS}


def build_engine(spec: EngineSpec) -> InferenceStrategy:
    """The one place where an engine is chosen. Each is imported only where it runs: they are large and exclude each other."""
    match spec.strategy:
        case VllmStrategyConfig():
            from roll_lite.distributed.strategy.inference.engine import EngineStrategy
            from roll_lite.distributed.strategy.vllm.compat.engine import VllmEngine

            return EngineStrategy(VllmEngine(spec), spec)
        case SglangStrategyConfig():
            from roll_lite.distributed.strategy.inference.engine import EngineStrategy
            from roll_lite.distributed.strategy.sglang.compat.engine import SglangEngine

            return EngineStrategy(SglangEngine(spec), spec)
        case ScriptedStrategyConfig():
            from roll_lite.distributed.strategy.scripted import ScriptedEngine

            return ScriptedEngine(spec.strategy)


def own_arguments_set(config: RunConfig) -> Iterator[Problem]:
    """Engine arguments in a configuration that are not the user's to set."""
    infer = config.actor_infer.strategy
    if isinstance(infer, EngineStrategyConfig):
        yield from _problems("actor_infer", infer.engine_args, OWN_ARGUMENTS[infer.name])
    for name, judge in config.judges.items():
        yield from _problems(f"judges.{name}", judge.strategy.engine_args, judge_server.OWN_ARGUMENTS)


def _problems(role: str, given: Mapping[str, Any], own: tuple[str, ...]) -> Iterator[Problem]:
    for argument in sorted(given.keys() & set(own)):
        yield Problem(f"{role}.strategy.engine_args.{argument}", OWN_ARGUMENT, given[argument])
