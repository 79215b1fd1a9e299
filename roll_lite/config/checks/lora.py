"""Checks of adapters: their layers and initial weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from math import prod

from roll_lite.config.arithmetic import actor_is_reference, adapters_of_engines, infer_dtype, trains, uses_reference
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.models import FEED_FORWARD, LINEAR_LAYERS, VllmStrategyConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.adapter_files import VLLM_RANKS, adapter_problems, adapter_shapes
from roll_lite.models.hf_config import read_hf_config, read_model_shape
from roll_lite.models.model_files import weight_shapes


def _targets(config: RunConfig) -> Iterator[Problem]:
    lora = config.actor_train.lora
    if lora is None:
        return
    for name in lora.targets:
        if name not in LINEAR_LAYERS:
            message = f"no such linear layer; {did_you_mean(name, LINEAR_LAYERS)}"
            yield Problem("actor_train.lora.targets", message, name)
    twice = [name for name, count in Counter(lora.targets).items() if count > 1]
    if twice:
        yield Problem("actor_train.lora.targets", f"lists {', '.join(twice)} more than once", lora.targets)


def _experts(config: RunConfig) -> Iterator[Problem]:
    lora = config.actor_train.lora
    try:
        experts = lora is not None and read_model_shape(config.model.path).experts
    except ValueError:  # the file checks report it
        return
    ranks = config.actor_train.strategy.expert_tensor_parallel
    if lora is not None and experts and ranks > 1 and (feed_forward := [name for name in lora.targets if name in FEED_FORWARD]):
        message = f"experts are adapted whole ({', '.join(feed_forward)} of actor_train.lora.targets); use 1, or targets of attention alone"
        yield Problem("actor_train.strategy.expert_tensor_parallel", message, ranks)


def _adapters_to_begin_with(config: RunConfig) -> Iterator[Problem]:
    lora = config.actor_train.lora
    if lora is not None and lora.path is not None:
        yield from (
            Problem("actor_train.lora.path", message, str(lora.path)) for message in adapter_problems(lora.path, lora.rank, lora.alpha)
        )


def _what_needs_whole_weights(config: RunConfig) -> Iterator[Problem]:
    lora, reference = config.actor_train.lora, config.reference
    if lora is not None and config.actor_train.ema is not None:
        yield Problem("actor_train.ema", "is an average of all weights, of which only adapters train; remove it, or lora")
    if lora is not None and config.actor_train.balance_coef > 0:
        message = "the router stays as it is where adapters train; use 0, or no lora"
        yield Problem("actor_train.balance_coef", message, config.actor_train.balance_coef)
    if lora is not None and lora.export == "adapter" and reference is not None and reference.refresh is not None:
        yield Problem("reference.refresh", "the reference takes whole weights; use actor_train.lora.export: merged, or remove this")


def _alone_to_engines(config: RunConfig) -> Iterator[Problem]:
    lora, strategy = adapters_of_engines(config), config.actor_infer.strategy
    if lora is not None and isinstance(strategy, VllmStrategyConfig) and lora.rank > VLLM_RANKS[-1]:
        message = f"vLLM takes adapters alone up to rank {VLLM_RANKS[-1]}; use less, or actor_train.lora.engines: merged"
        yield Problem("actor_train.lora.rank", message, lora.rank)


def _alone_to_engines_of_experts(config: RunConfig) -> Iterator[Problem]:
    lora = adapters_of_engines(config)
    if lora is None:
        return
    try:
        shape = read_model_shape(config.model.path)
    except ValueError:  # the file checks report it
        return
    if shape.experts and (feed_forward := [name for name in lora.targets if name in FEED_FORWARD]):
        message = f"engines get adapters of experts ({', '.join(feed_forward)} of targets) in merged weights only; use merged"
        yield Problem("actor_train.lora.engines", f"{message}, or targets of attention alone", lora.engines)


def reference_notes(config: RunConfig) -> list[str]:
    """Note on the weights that KL is measured against."""
    if config.actor_train.lora is None or not uses_reference(config) or not trains(config):
        return []
    if config.reference is not None and config.reference.refresh is not None:
        return []
    if actor_is_reference(config):
        return ["KL is measured against actor_train with its adapters off: a pass more, and no model more (a `reference` section has one)"]
    return ["reference holds the weights that actor_train has under its adapters; without the section actor_train makes that pass itself"]


def engine_notes(config: RunConfig) -> list[str]:
    """Note on the size of an update if engines get the adapters alone."""
    lora = adapters_of_engines(config)
    if lora is None:
        return []
    try:
        weights = weight_shapes(read_hf_config(config.model.path))
    except ValueError:  # reported as a problem of the model
        return []
    size = 2 if infer_dtype(config) == "bfloat16" else 4
    alone, all_of_it = (
        size * sum(map(prod, shapes.values())) / 2**20 for shapes in (adapter_shapes(weights, lora.targets, lora.rank), weights)
    )
    return [f"engines get the adapters alone: {alone:,.1f} MB in every update instead of {all_of_it:,.0f} MB"]


def _whole_heads(config: RunConfig) -> Iterator[Problem]:
    """Refuse more tensor-parallel ranks than key/value heads: adapters of query, key and value are cut by these heads."""
    tensor_parallel = config.actor_train.strategy.tensor_parallel
    with suppress(ValueError):  # reported as a problem of the model
        heads = read_model_shape(config.model.path).kv_heads if config.actor_train.lora is not None else tensor_parallel
        if tensor_parallel > heads:
            message = f"is more than the model's {heads} key/value heads, which adapters are cut by; use at most {heads}, or no lora"
            yield Problem("actor_train.strategy.tensor_parallel", message, tensor_parallel)


def _adapters_on_every_stage(config: RunConfig) -> Iterator[Problem]:
    strategy = config.actor_train.strategy
    layers, stages = strategy.pipeline_layers, strategy.pipeline_parallel
    if config.actor_train.lora is not None and layers and not all(any(layers[stage::stages]) for stage in range(stages)):
        yield Problem("actor_train.strategy.pipeline_layers", "a stage without layers has no adapters to train; give it some", layers)


LORA_CHECKS = (_whole_heads, _adapters_on_every_stage, _targets, _what_needs_whole_weights, _alone_to_engines)
LORA_FILE_CHECKS = (_experts, _alone_to_engines_of_experts, _adapters_to_begin_with)
