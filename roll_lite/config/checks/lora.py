from __future__ import annotations

from roll_lite.config.arithmetic import actor_is_reference, adapters_of_engines, trains, uses_reference
from roll_lite.config.checks.layout import known_shape
from roll_lite.config.schema.base import Mistakes
from roll_lite.config.schema.models import FEED_FORWARD, VllmStrategyConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.adapter_files import VLLM_RANKS, adapter_problems


def _layers(config: RunConfig) -> Mistakes:
    lora, strategy = config.actor_train.lora, config.actor_train.strategy
    if lora is None:
        return
    shape = known_shape(config.model.path)
    if strategy.tensor_parallel > shape.kv_heads:
        heads = f"{shape.kv_heads} key/value heads, which adapters are cut by; use at most {shape.kv_heads}, or no lora"
        yield "actor_train.strategy.tensor_parallel", f"is more than the model's {heads}"
    feed_forward = ", ".join(name for name in lora.targets if name in FEED_FORWARD)
    if shape.experts and feed_forward and strategy.expert_tensor_parallel > 1:
        message = f"experts are adapted whole ({feed_forward} of actor_train.lora.targets); use 1, or targets of attention alone"
        yield "actor_train.strategy.expert_tensor_parallel", message
    if shape.experts and feed_forward and adapters_of_engines(config) is not None:
        message = f"engines get adapters of experts ({feed_forward} of targets) in merged weights only; use merged"
        yield "actor_train.lora.engines", f"{message}, or targets of attention alone"


def _initial_adapters(config: RunConfig) -> Mistakes:
    lora = config.actor_train.lora
    if lora is not None and lora.path is not None:
        for message in adapter_problems(lora.path, lora.rank, lora.alpha):
            yield "actor_train.lora.path", message


def _reference(config: RunConfig) -> Mistakes:
    lora, reference = config.actor_train.lora, config.reference
    if lora is not None and lora.export == "adapter" and reference is not None and reference.refresh is not None:
        yield "reference.refresh", "the reference takes whole weights; use actor_train.lora.export: merged, or remove this"


def _rank_in_vllm(config: RunConfig) -> Mistakes:
    lora = adapters_of_engines(config)
    if lora is not None and isinstance(config.actor_infer.strategy, VllmStrategyConfig) and lora.rank > VLLM_RANKS[-1]:
        message = f"vLLM takes adapters alone up to rank {VLLM_RANKS[-1]}; use less, or actor_train.lora.engines: merged"
        yield "actor_train.lora.rank", message


LORA_CHECKS = (_reference, _rank_in_vllm, _layers)
LORA_FILE_CHECKS = (_initial_adapters,)


def reference_notes(config: RunConfig) -> list[str]:
    if config.actor_train.lora is None or not uses_reference(config) or not trains(config):
        return []
    if config.reference is not None and config.reference.refresh is not None:
        return []
    if actor_is_reference(config):
        return ["KL is measured against actor_train with its adapters off: a pass more, and no model more (a `reference` section has one)"]
    return ["reference holds the weights that actor_train has under its adapters; without the section actor_train makes that pass itself"]
