from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from roll_lite.distributed.strategy.inference.adapters import AdaptedLayer
from roll_lite.distributed.strategy.vllm.compat.requests import ADAPTERS


def put_adapters(runner: Any, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the LoRA matrices that all requests use. B already includes alpha / rank."""
    known = runner.lora_manager._adapter_manager
    mapper = getattr(known.model, "hf_to_vllm_mapper", None)
    adapters = LoRAModel.from_lora_tensors(
        ADAPTERS,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device=known.device,
        dtype=known.lora_config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    known.remove_adapter(ADAPTERS)
    known.add_adapter(adapters)
    if astray := adapters.loras.keys() - known.modules.keys():  # vLLM would ignore them
        raise RuntimeError(f"vLLM has no layers for adapters of {', '.join(sorted(astray)[:5])}")
    known.activate_adapter(ADAPTERS)
    adapters.loras.clear()  # the layers hold copies


def multiply_plainly() -> None:
    """Make vLLM apply the adapter by plain matrix products on a CPU, where it would gather A and B per token."""

    def add_lora_linear(
        self: PunicaWrapperCPU,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        outputs = y.view(-1, y.shape[-1]).split(output_slices, dim=-1)
        for output, a, b in zip(outputs, lora_a_stacked, lora_b_stacked, strict=True):
            output.addmm_(torch.nn.functional.linear(x.view(-1, x.shape[-1]), a[0, 0]), b[0, 0].t(), alpha=scale)

    PunicaWrapperCPU.add_lora_linear = add_lora_linear


def adapted_layers(runner: Any, rank: int) -> Iterator[AdaptedLayer]:
    known = runner.lora_manager._adapter_manager
    slot = known.lora_index_to_id.index(ADAPTERS)
    for path, module in known.modules.items():
        a = torch.cat([part[slot, 0, :rank] for part in module.lora_a_stacked])
        b = torch.cat([part[slot, 0, :, :rank] for part in module.lora_b_stacked])
        yield AdaptedLayer(path, module.base_layer, a, b)
