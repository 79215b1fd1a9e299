"""Adapters in SGLang's scheduler processes, in the place that it has for those that it reads from files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.lora import layers as lora_layers
from sglang.srt.lora.backend import torch_backend
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import get_target_module_name

from roll_lite.distributed.strategy.inference.adapters import NAME, AdaptedLayer


def put_adapters(runner: Any, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """In the place of others, for all requests that run or come. What they are multiplied by is in them."""
    manager = runner.lora_manager
    reference = LoRARef(lora_id=NAME, lora_name=NAME, lora_path=NAME, pinned=False)
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted({name.split(".")[-3] for name in tensors})}
    manager.unload_lora_adapter(reference)
    loaded = manager.load_lora_adapter_from_tensors(
        reference, {name: tensor.to(manager.dtype) for name, tensor in tensors.items()}, described
    )
    if not loaded.success:
        raise RuntimeError(loaded.error_message)
    manager.fetch_new_loras({NAME})


def adapted_layers(runner: Any) -> Iterator[AdaptedLayer]:
    manager, pool = runner.lora_manager, runner.lora_manager.memory_pool
    slot = pool.uid_to_buffer_id[NAME]
    for number, modules in enumerate(manager.lora_modules):
        for path, module in modules.items():
            target = get_target_module_name(path, pool.target_modules)
            yield AdaptedLayer(path, module.base_layer, pool.A_buffer[target][number][slot], pool.B_buffer[target][number][slot])


class _Unpinned:
    """torch, for modules that put what they compute with into pinned memory, which takes a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        return torch.tensor(*args, **rest)

    def zeros(self, *args: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        return torch.zeros(*args, **rest)


def do_without_pinned_memory() -> None:
    """SGLang's adapters on a CPU, in this process."""
    lora_layers.torch = torch_backend.torch = _Unpinned()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
