from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs, MicroBatchPlan, padded
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.megatron.log_probs import distribution, log_probs_and_entropy
from roll_lite.distributed.strategy.megatron.packed_rows import ContextCut, PackedRows, on_device, packed
from roll_lite.distributed.strategy.megatron.routing import EXPERTS, REPLAYED, Routes
from roll_lite.distributed.strategy.megatron.vocabulary import Vocabulary
from roll_lite.models.hf_config import ExpertsConfig

KEPT, TEMPERATURE = "kept_ids", "temperature"
"""Batch columns: token ids that a truncated softmax keeps, and the softmax's temperature."""


@dataclass(frozen=True)
class ModelInput:
    input_ids: torch.Tensor
    """[1, tokens]: packed rows. With context parallelism, fields other than micro_batch are this rank's part."""
    rows: PackedRows
    positions: torch.Tensor
    """[N + E]: indices of N tokens with a result and, for output `final_value`, of E rows' ends."""
    slots: torch.Tensor
    """[N]: index of each result in the flattened padded column [B, T - 1]."""
    ends: torch.Tensor
    """[E]: row of each row end in `positions`; E = 0 without `final_value`."""
    targets: torch.Tensor
    micro_batch: MicroBatch
    """Padded rows for the loss; empty on a rank that only joins collectives."""
    kept: torch.Tensor | None = None
    temperatures: torch.Tensor | None = None
    """[N]: softmax temperatures; None for a value head."""


def model_inputs(
    batch: DataProto,
    plan: MicroBatchPlan,
    device: torch.device,
    columns: Collection[str] | None = None,
    ends: bool = False,
    experts: ExpertsConfig | None = None,
    record: bool = False,
) -> list[ModelInput]:
    """Build the model's inputs, one per micro-batch. `columns`: those the loss reads; None: all. `ends`: add results at rows' ends.
    `experts`: None for dense models. `record`: keep expert choices."""
    inputs = []
    for rows in plan.cut(batch):
        given, cut = _model_input(rows, plan.tokens_divisor, device, columns, ends)
        if experts is not None and (routes := _routes(rows, cut, experts, record)) is not None:
            given = replace(given, rows=replace(given.rows, routes=routes.on_device(partial(_to, device=device))))
        inputs.append(given)
    return inputs


def _routes(batch: DataProto, cut: ContextCut, experts: ExpertsConfig, record: bool) -> Routes | None:
    replayed = next((name for name in REPLAYED if name in batch), None)
    if replayed is None and not record:
        return None
    places, given = cut.places(), None
    if replayed is not None:
        values, width = batch.ragged(replayed).values, sum(experts.layers) * experts.per_token
        values = values.expand(-1, width) if values.dim() == 2 else values.new_full((0, width), -1)  # width 1: no recorded routes
        whole = torch.nn.functional.pad(values, (0, 0, 0, cut.tokens - len(values)), value=-1)
        given = whole[places].view(len(places), -1, experts.per_token)
    return Routes(places, cut.tokens, given, {} if record else None)


def _model_input(
    batch: DataProto, tokens_divisor: int, device: torch.device, columns: Collection[str] | None, ends: bool
) -> tuple[ModelInput, ContextCut]:
    """Build one micro-batch's input on the host: no waiting for the device."""
    micro_batch = padded(batch.select(name for name in batch.columns if name not in REPLAYED))
    transitions = micro_batch.mask.shape[1]
    slots = micro_batch.mask.reshape(-1).nonzero().squeeze(1)
    ids, lengths = batch.ragged("input_ids").values, batch.lengths
    rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    own_ids, rows, cut = packed(ids, lengths, tokens_divisor, rank, ranks)
    begins = lengths.cumsum(0) - lengths
    counting = begins[slots // transitions] + slots % transitions
    here, positions = cut.find(counting)
    slots, targets = slots[here], ids.index_select(0, counting[here] + 1)
    with_end, last = cut.find(begins + lengths - 1) if ends else (torch.zeros(len(batch), dtype=torch.bool), slots[:0])
    kept, temperatures = micro_batch.columns.get(KEPT), micro_batch.columns.get(TEMPERATURE)
    seen = set(micro_batch.columns if columns is None else columns) - {KEPT, TEMPERATURE}
    wanted = {name: column for name, column in micro_batch.columns.items() if name in seen}
    to = partial(_to, device=device)
    model_input = ModelInput(
        input_ids=to(own_ids[None]),
        rows=on_device(rows, to),
        positions=to(torch.cat([positions, last])),
        slots=to(slots),
        ends=to(with_end.nonzero().squeeze(1)),
        targets=to(targets),
        micro_batch=MicroBatch({name: to(column) for name, column in wanted.items()}, to(micro_batch.mask)),
        kept=to(kept.flatten(0, 1).index_select(0, slots)) if kept is not None else None,
        temperatures=to(temperatures.index_select(0, slots // transitions)) if temperatures is not None else None,
    )
    return model_input, cut


def outputs_of(
    result: torch.Tensor,
    weight: torch.Tensor | None,
    given: ModelInput,
    outputs: Sequence[str],
    vocab_size: int,
    group: dist.ProcessGroup,
) -> MicroBatchOutputs:
    """Compute `outputs`, such as log-probs, from the last stage's values or hidden states; padded, 0 outside the response mask."""
    shape = given.micro_batch.mask.shape
    if set(outputs) & {"values", "final_value"}:
        values, ends = result.split([len(given.slots), len(result) - len(given.slots)])
        return MicroBatchOutputs(
            values=_scatter(values, given.slots, shape) if "values" in outputs else None,
            final_value=_scatter(ends, given.ends, shape[:1]) if "final_value" in outputs else None,
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


def check_outputs(outputs: Sequence[str], value_head: bool, training: bool = False, experts: bool = False) -> None:
    known = ("values", "final_value")[: 1 if training else 2] if value_head else ("log_probs", "entropy", "distribution")
    known = (*known, EXPERTS) if experts and not training else known
    assert outputs and set(outputs) <= set(known), f"outputs {list(outputs)}, the model has {known}"


def _scatter(flat: torch.Tensor, slots: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scatter results [N, ...] into zeros [*shape, ...] and sum over context-parallel ranks. Backward gives each rank its tokens'
    gradients."""
    entry = flat.shape[1:]
    scattered = flat.new_zeros(shape.numel(), *entry).index_copy(0, slots, flat).view(*shape, *entry)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(scattered, group=parallel_state.get_context_parallel_group())


def _to(tensor: torch.Tensor, device: torch.device) -> Any:
    if device.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
