from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_lite.config.problems import Problem, or_nearest
from roll_lite.config.schema.models import (
    EngineStrategyConfig,
    HfStrategyConfig,
    InferStrategyConfig,
    MegatronStrategyConfig,
    SglangStrategyConfig,
    VllmStrategyConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.strategy.sglang.compat import settings as sglang
from roll_lite.distributed.strategy.vllm.compat import judge_server
from roll_lite.distributed.strategy.vllm.compat import settings as vllm

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.base import EngineSpec, ForwardStrategy, InferenceStrategy, ModelSpec
    from roll_lite.distributed.strategy.inference.make import EnginePart


ENGINES: Mapping[str, Callable[[], str]] = {"vllm": vllm.check_version, "sglang": sglang.check_version}
"""{engine: function that returns the installed version; raises NotInstalled, or RuntimeError for an unsupported one}."""


CONNECTS_RANKS: Mapping[str, bool] = {"megatron": True, "hf": False}
"""{strategy of a model: True if its ranks share a process group, so that none is replaced alone}."""


def build_model(spec: ModelSpec) -> ForwardStrategy:
    match spec.strategy:
        case MegatronStrategyConfig():
            from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

            return MegatronStrategy(spec)
        case HfStrategyConfig():
            from roll_lite.distributed.strategy.hf import HfRewardStrategy

            return HfRewardStrategy(spec)


def build_engine(spec: EngineSpec) -> InferenceStrategy:
    """Build an engine, importing its package only: vLLM and SGLang cannot be installed together."""
    match spec.strategy:
        case VllmStrategyConfig():
            from roll_lite.distributed.strategy.inference.strategy import EngineStrategy
            from roll_lite.distributed.strategy.vllm.compat.engine import VllmEngine

            return EngineStrategy(VllmEngine(spec), spec)
        case SglangStrategyConfig():
            from roll_lite.distributed.strategy.inference.strategy import EngineStrategy
            from roll_lite.distributed.strategy.sglang.compat.engine import SglangEngine

            return EngineStrategy(SglangEngine(spec), spec)


def share_of_device(strategy: InferStrategyConfig, place: int, sharers: int) -> InferStrategyConfig:
    """Return the settings of one of `sharers` engines sharing a GPU equally. `place`: number of engines started earlier. vLLM's memory
    setting is a fraction of all GPU memory, SGLang's of the free memory."""
    part = strategy.gpu_memory_utilization / sharers
    taken = place * part if isinstance(strategy, SglangStrategyConfig) else 0.0
    return strategy.model_copy(update={"gpu_memory_utilization": part / (1 - taken)})


def build_part(spec: EngineSpec) -> EnginePart:
    """Build the part of a multi-node engine on a node other than the first."""
    match spec.strategy:
        case VllmStrategyConfig():
            from roll_lite.distributed.strategy.vllm.compat.engine import VllmPart

            return VllmPart(spec)
        case SglangStrategyConfig():
            from roll_lite.distributed.strategy.sglang.compat.engine import SglangEngine

            return SglangEngine(spec)


ROLLOUT_ENGINE_SETTINGS = {
    **dict.fromkeys(("quantization", "quantization_config", "modelopt_quant"), "quantization"),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "speculation"),
}
"""{argument that rollout engines refuse: configuration key for it}. Judges may use the argument."""


def engine_arguments_fit(config: RunConfig) -> Iterator[Problem]:
    infer = config.actor_infer.strategy
    if isinstance(infer, EngineStrategyConfig):
        own, settings, fields = (
            (sglang.OWN_ARGUMENTS, sglang.SETTINGS, sglang.FIELDS)
            if isinstance(infer, SglangStrategyConfig)
            else (vllm.OWN_ARGUMENTS, vllm.SETTINGS, vllm.FIELDS)
        )
        known = declared_fields(infer.name, fields) if infer.engine_args else frozenset[str]()
        yield from _problems("actor_infer", infer.engine_args, own, {**settings, **ROLLOUT_ENGINE_SETTINGS}, known)
    for name, judge in config.judges.items():
        known = declared_fields("vllm", vllm.SERVER_FIELDS) if judge.strategy.engine_args else frozenset[str]()
        yield from _problems(f"judges.{name}", judge.strategy.engine_args, judge_server.OWN_ARGUMENTS, vllm.SETTINGS, known)


def _problems(
    role: str, given: Mapping[str, Any], own: tuple[str, ...], settings: Mapping[str, str], known: Collection[str]
) -> Iterator[Problem]:
    """Yield unusable engine arguments. `own`: set by roll_lite. `settings`: {argument: key to use instead}. `known`: the engine's
    arguments; empty: not checked."""
    for argument, value in sorted(given.items()):
        place = f"{role}.strategy.engine_args.{argument}"
        if argument in own:
            yield Problem(place, "roll_lite sets this one itself; remove it", value)
        elif argument in settings:
            yield Problem(place, f"has a key of its own: write it as {role}.strategy.{settings[argument]}", value)
        elif known and argument not in known:
            yield Problem(place, f"the engine that is installed has no such argument{or_nearest(argument, known)}", value)


def declared_fields(package: str, places: Sequence[tuple[str, str | None]]) -> frozenset[str]:
    """Parse an installed package's field names, since importing takes seconds; empty if a class is missing. `places`: (file pattern, class
    name or None for all)."""
    spec = find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    names: set[str] = set()
    for pattern, wanted in places:
        trees = [ast.parse(file.read_text(encoding="utf-8")) for folder in folders for file in folder.glob(pattern)]
        classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and wanted in (None, node.name)]
        if not classes:
            return frozenset()
        fields = [line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
        names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return frozenset(names)
