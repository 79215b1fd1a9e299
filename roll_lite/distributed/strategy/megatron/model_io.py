"""Between padded micro-batches and the model's flat view of them: only the positions that count reach the model's head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs, MicroBatchPlan
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.megatron.distribution import distribution
from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy
from roll_lite.distributed.strategy.megatron.vocabulary import Vocabulary

KEPT, TEMPERATURE = "kept_ids", "temperature"
"""The columns that say which tokens a softmax goes over, and what their logits are divided by. They are for the head; losses do not see
them."""


@dataclass(frozen=True)
class ModelInput:
    """A micro-batch on the device, ready for the model."""

    input_ids: torch.Tensor
    """[B, T]"""
    positions: torch.Tensor
    """[N] t * B + b of the positions whose next token counts: where they stand in the model's [T, B, hidden]. Behind them [B], the last
    position of each row, where final_value is asked for."""
    slots: torch.Tensor
    """[N] b * (T - 1) + t: where their results go in [B, T - 1]."""
    targets: torch.Tensor
    """[N] the tokens that follow."""
    micro_batch: MicroBatch
    """For the loss; without rows where this one only keeps step with other ranks."""
    kept: torch.Tensor | None = None
    """[N, K] the column kept_ids, where the batch has it."""
    temperatures: torch.Tensor | None = None
    """[N] that of the position's row; a value head does without."""


def model_inputs(
    batch: DataProto, plan: MicroBatchPlan, device: torch.device, columns: Collection[str] | None = None, ends: bool = False
) -> list[ModelInput]:
    """The plan's micro-batches. `columns`: those that the loss sees; all where None. `ends`: with the last position of each row."""
    lengths = plan.lengths(batch) if ends else [None] * plan.count
    return [_model_input(micro, device, columns, last) for micro, last in zip(plan.micro_batches(batch), lengths, strict=True)]


def _model_input(
    micro_batch: MicroBatch, device: torch.device, columns: Collection[str] | None, lengths: torch.Tensor | None
) -> ModelInput:
    """Positions are worked out on the host, so that the device is never waited for."""
    input_ids, mask = micro_batch.columns["input_ids"], micro_batch.mask
    batch, transitions = mask.shape
    slots = mask.reshape(-1).nonzero().squeeze(1)
    row, step = slots // transitions, slots % transitions
    targets = input_ids[:, 1:].reshape(-1).index_select(0, slots)
    positions = step * batch + row
    if lengths is not None:
        positions = torch.cat([positions, (lengths - 1) * batch + torch.arange(batch)])
    kept, temperatures = micro_batch.columns.get(KEPT), micro_batch.columns.get(TEMPERATURE)
    seen = set(micro_batch.columns if columns is None else columns) - {KEPT, TEMPERATURE}
    wanted = {name: column for name, column in micro_batch.columns.items() if name in seen}
    on_device = {name: _to(column, device) for name, column in wanted.items()}
    return ModelInput(
        # Without rows the model still runs, on one row of padding of which nothing is asked.
        input_ids=_to(input_ids if batch else input_ids.new_zeros(1, input_ids.shape[1]), device),
        positions=_to(positions, device),
        slots=_to(slots, device),
        targets=_to(targets, device),
        micro_batch=MicroBatch(on_device, _to(mask, device)),
        kept=_to(kept.flatten(0, 1).index_select(0, slots), device) if kept is not None else None,
        temperatures=_to(temperatures.index_select(0, row), device) if temperatures is not None else None,
    )


def outputs_of(
    result: torch.Tensor,
    weight: torch.Tensor | None,
    given: ModelInput,
    outputs: Sequence[str],
    vocab_size: int,
    group: dist.ProcessGroup,
) -> MicroBatchOutputs:
    """The padded columns that losses read, 0 where the mask is 0, of what the model's last stage returned: values, or hidden states that go
    with the output weight."""
    shape = (given.micro_batch.mask.shape[0], given.input_ids.shape[1] - 1)
    if set(outputs) & {"values", "final_value"}:
        values, ends = result.split([len(given.slots), len(result) - len(given.slots)])
        return MicroBatchOutputs(
            values=_scatter(values, given.slots, shape) if "values" in outputs else None,
            final_value=ends if "final_value" in outputs else None,
        )
    assert weight is not None, "only values do without the output weight"
    if given.temperatures is None:
        raise ValueError(f"{', '.join(outputs)} of a batch without the column {TEMPERATURE}: a softmax is that of its row's temperature")
    vocabulary = Vocabulary(len(weight), vocab_size, group, given.targets, given.temperatures, given.kept)
    found = MicroBatchOutputs()
    if "distribution" in outputs:
        found = replace(found, distribution=_scatter(distribution(result, weight, vocabulary), given.slots, shape))
    if set(outputs) & {"log_probs", "entropy"}:
        log_probs, entropy = log_probs_and_entropy(result, weight, vocabulary, entropy="entropy" in outputs)
        found = replace(
            found,
            log_probs=_scatter(log_probs, given.slots, shape) if "log_probs" in outputs else None,
            entropy=_scatter(entropy, given.slots, shape) if entropy is not None else None,
        )
    return found


def to_host(outputs: MicroBatchOutputs) -> MicroBatchOutputs:
    """What is too large to stay on the device until the last micro-batch is done."""
    return outputs if outputs.distribution is None else replace(outputs, distribution=outputs.distribution.cpu())


def check_outputs(outputs: Sequence[str], value_head: bool, training: bool = False) -> None:
    known = ("values", "final_value")[: 1 if training else 2] if value_head else ("log_probs", "entropy", "distribution")
    unknown = [name for name in outputs if name not in known]
    if unknown or not outputs:
        raise ValueError(f"outputs {list(outputs)}: a model {'with' if value_head else 'without'} value head has {', '.join(known)}")


def _scatter(flat: torch.Tensor, slots: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[N, ...] to [B, T - 1, ...], differentiable."""
    entry = flat.shape[1:]
    return flat.new_zeros(shape[0] * shape[1], *entry).index_copy(0, slots, flat).view(*shape, *entry)


def _to(tensor: torch.Tensor, device: torch.device) -> Any:
    if device.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
