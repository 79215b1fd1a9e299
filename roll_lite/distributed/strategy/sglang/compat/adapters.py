from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.lora import layers as lora_layers
from sglang.srt.lora.backend import torch_backend
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import get_target_module_name
from sglang.srt.model_executor import model_runner

from roll_lite.distributed.strategy.inference.adapters import NAME, AdaptedLayer
from roll_lite.models.adapter_files import A


def put_adapters(runner: Any, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the LoRA matrices that all requests use. B already includes alpha / rank."""
    manager = runner.lora_manager
    reference = LoRARef(lora_id=NAME, lora_name=NAME, lora_path=NAME, pinned=False)
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted({name.split(".")[-3] for name in tensors})}
    manager.unload_lora_adapter(reference)
    whole = {name: _padded(name, tensor, manager.base_hf_config).to(manager.dtype) for name, tensor in tensors.items()}
    loaded = manager.load_lora_adapter_from_tensors(reference, whole, described)
    if not loaded.success:
        raise RuntimeError(loaded.error_message)
    manager.fetch_new_loras({NAME})


def _padded(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Pad an adapter tensor with zeros like SGLang's weights: on a CPU, SGLang pads dimensions that workers cannot share evenly."""
    *_, target, matrix, _ = name.split(".")
    head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    columns = {"o_proj": queries, "down_proj": config.intermediate_size}
    dim = int(matrix == A)
    size = (columns if matrix == A else rows).get(target, tensor.shape[dim])
    missing = tensor.new_zeros([size - length if at == dim else length for at, length in enumerate(tensor.shape)])
    return torch.cat([tensor, missing], dim)


def adapters_leave_with_weights() -> None:
    """Allocate adapter buffers in the weights' memory region, with which they are offloaded."""
    init = model_runner.ModelRunner.init_lora_manager

    def init_lora_manager(runner: Any) -> None:
        with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=True):
            init(runner)

    model_runner.ModelRunner.init_lora_manager = init_lora_manager


def adapted_layers(runner: Any) -> Iterator[AdaptedLayer]:
    manager, pool = runner.lora_manager, runner.lora_manager.memory_pool
    slot = pool.uid_to_buffer_id[NAME]
    for number, modules in enumerate(manager.lora_modules):
        for path, module in modules.items():
            target = get_target_module_name(path, pool.target_modules)
            yield AdaptedLayer(path, module.base_layer, pool.A_buffer[target][number][slot], pool.B_buffer[target][number][slot])


class _Unpinned:
    """Stand-in for torch that ignores requests for pinned memory, which needs a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        return torch.tensor(*args, **rest)

    def zeros(self, *args: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        return torch.zeros(*args, **rest)


def do_without_pinned_memory() -> None:
    lora_layers.torch = torch_backend.torch = _Unpinned()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
