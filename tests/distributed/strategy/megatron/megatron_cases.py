"""Models, batches, losses and the Hugging Face oracle that the strategy's tests share."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_ranks import DEVICE
from support_models import PAD_ID, VOCAB_SIZE, by_checkpoint, load_hf, make_tiny_model
from transformers import PreTrainedModel

from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import ModelSpec, StateCopy
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

FAMILIES = ("qwen2", "qwen3", "llama")
TEMPERATURES = torch.tensor([1.0, 0.7, 0.35, 1.6])


def tiny(folder: Path, family: str = "qwen2", **overrides: Any) -> Path:
    """Four heads and two key/value heads, so that two tensor ranks can share it; Llama's embeddings are not tied."""
    hidden = overrides.get("hidden", 128)
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32}
    return make_tiny_model(folder, family=family, **{"hidden": hidden, "tied": family != "llama", **heads, **overrides})  # type: ignore[arg-type]


def started(path: Path, optimizer: OptimizerConfig | None = None, dtype: str = "float32", **options: Any) -> MegatronStrategy:
    """A strategy on this process group. Options that are no fields of the strategy's configuration go to the spec."""
    layout = {name: options.pop(name) for name in list(options) if name in MegatronStrategyConfig.model_fields}
    model, config = ModelConfig(path=path, dtype=dtype), MegatronStrategyConfig(**layout)  # type: ignore[arg-type]
    strategy = MegatronStrategy(ModelSpec(model, config, options.pop("path_key", "model.path"), optimizer, **options))
    strategy.initialize()
    return strategy


def parameters_of(strategy: MegatronStrategy) -> list[torch.nn.Parameter]:
    """On this rank."""
    return [parameter for chunk in strategy._chunks for parameter in chunk.parameters()]


def optimizer_of(strategy: MegatronStrategy) -> Any:
    """The optimizer and its schedule, as a strategy that trains has them."""
    assert strategy._optimizer is not None
    return strategy._optimizer


def copied(strategy: MegatronStrategy) -> StateCopy:
    """A copy of its state, which comes back read-only, as from Ray's object store."""
    arrays, *others = strategy.copy_state()
    return [np.frombuffer(array.tobytes(), np.uint8) for array in arrays], *pickle.loads(pickle.dumps(others))


def batch_of(lengths: Sequence[int] = (9, 4, 12, 2, 7, 5), vocab: int = VOCAB_SIZE, seed: int = 3) -> DataProto:
    """Rows whose first third or so is the prompt, with a gap in the response mask of longer rows, random advantages as weights, and
    temperatures that differ. Token 0, the pad token, occurs in prompt and response."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for length in lengths:
        mask = torch.arange(length) >= max(1, length // 3)
        if length > 6:
            mask[length // 2] = False
        masks.append(mask)
    return DataProto(
        {
            "sample": torch.arange(len(lengths)),
            "temperature": TEMPERATURES[torch.arange(len(lengths)) % len(TEMPERATURES)],
            "input_ids": Ragged.from_rows([_with_padding(torch.randint(0, vocab, (length,), generator=generator)) for length in lengths]),
            "response_mask": Ragged.from_rows(masks),
            "advantages": Ragged.from_rows([torch.randn(length - 1, generator=generator) for length in lengths]),
            "returns": Ragged.from_rows([torch.randn(length - 1, generator=generator) for length in lengths]),
        }
    )


def _with_padding(ids: torch.Tensor) -> torch.Tensor:
    ids[0] = ids[len(ids) // 2] = PAD_ID
    return ids


def weighted_loss(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A policy-gradient-like sum over the masked tokens, with an entropy bonus where there is an entropy; for values a squared error."""
    mask, weights = micro_batch.mask, micro_batch.columns["advantages"]
    if outputs.values is not None:
        token_loss = 0.5 * (outputs.values - micro_batch.columns["returns"]) ** 2
    else:
        assert outputs.log_probs is not None
        token_loss = -weights * outputs.log_probs
        if outputs.entropy is not None:
            token_loss = token_loss - 0.3 * outputs.entropy
    loss = (token_loss * mask).sum()
    return loss, {"tokens": mask.sum(), "rows": torch.tensor(mask.shape[0], device=mask.device), "loss": loss}


def hf_log_probs(model: PreTrainedModel, input_ids: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: log-probs and entropy, [T - 1] each."""
    log_p = torch.log_softmax(model(input_ids[None]).logits[0, :-1].float() / temperature, dim=-1)
    return log_p.gather(1, input_ids[1:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def hf_values(model: PreTrainedModel, head: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """[T - 1]: the value at every position but the last."""
    hidden = model.model(input_ids[None]).last_hidden_state[0, :-1]
    return (hidden @ head.T).squeeze(-1)


def hf_loss(model: PreTrainedModel, batch: DataProto, entropy: bool = True, head: torch.Tensor | None = None) -> torch.Tensor:
    """weighted_loss over the whole batch, row by row and without padding."""
    total = torch.zeros(())
    for row in range(len(batch)):
        ids, mask = batch.ragged("input_ids").row(row), batch.ragged("response_mask").row(row)[1:]
        if head is not None:
            token_loss = 0.5 * (hf_values(model, head, ids) - batch.ragged("returns").row(row)) ** 2
        else:
            log_p, bonus = hf_log_probs(model, ids, batch.tensor("temperature")[row])
            token_loss = -batch.ragged("advantages").row(row) * log_p - (0.3 * bonus if entropy else 0.0)
        total = total + (token_loss * mask).sum()
    return total


def hf_gradients(path: Path, batch: DataProto, entropy: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    model = load_hf(path)
    loss = hf_loss(model, batch, entropy)
    loss.backward()
    return loss.item(), by_checkpoint({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})


def own_gradients(strategy: MegatronStrategy) -> dict[str, torch.Tensor]:
    """What train_step accumulated, under Hugging Face's names, on the ranks that own it. Needs distributed_optimizer=False, no clipping."""
    exported: dict[str, torch.Tensor] = {}
    for tensors in strategy.export_plan(1 << 16).buckets():
        found = strategy._exporter.bucket(tensors, read=lambda parameter: parameter.main_grad) or {}
        exported.update({name: gradient.to("cpu", copy=True) for name, gradient in found.items()})
    return exported


def own_weights(strategy: MegatronStrategy) -> dict[str, torch.Tensor]:
    exported: dict[str, torch.Tensor] = {}
    for tensors in strategy.export_plan(1 << 16).buckets():
        exported.update({name: tensor.to("cpu", copy=True) for name, tensor in (strategy.export_bucket(tensors) or {}).items()})
    return exported


def expected_of(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a rank that exports something should export: all, where no other rank has tensors of its own."""
    shared = layout.get("pipeline_parallel") or layout.get("expert_parallel")
    return {name: theirs[name] for name in (ours if shared else theirs)}


def shard(batch: DataProto, strategy: MegatronStrategy, sizes: Sequence[int] | None = None) -> DataProto:
    """This data-parallel rank's rows."""
    layout = strategy.layout
    if sizes is None:
        share = -(-len(batch) // layout.data_size)
        sizes = [min(share, max(0, len(batch) - share * rank)) for rank in range(layout.data_size)]
    start = sum(sizes[: layout.data_rank])
    return batch.slice(start, start + sizes[layout.data_rank])


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the size of each tensor, and to the largest of all where a tensor is next to nothing (key biases have no gradient)."""
    assert set(ours) == set(theirs)
    largest = max(float(tensor.norm()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        difference = float((ours[name].float() - tensor).norm())
        assert difference <= tolerance * max(float(tensor.norm()), 1e-3 * largest), f"{name}: off by {difference} of {float(tensor.norm())}"


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 1e-2) -> None:
    """What is computed a second time: the same bits. On a GPU, whose kernels add up in any order, the same but for rounding; biases of
    keys, whose gradients are rounding and nothing else, are then left out."""
    if DEVICE == "cpu":
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    else:
        ours, theirs = ({name: one for name, one in each.items() if "k_proj.bias" not in name} for each in (found, expected))
        assert_same(ours, {name: theirs[name].float() for name in ours}, tolerance)


def assert_repeats(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-4) -> None:
    """Results of steps that are taken a second time: the same bits. On a GPU losses and gradient norms, but for rounding."""
    if DEVICE == "cpu":
        assert found == expected
    else:
        ours, theirs = ([number for one in results for number in (one.loss, one.grad_norm)] for results in (found, expected))
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def reported_once(folder: Path, own: Sequence[Path]) -> None:
    """Each file of the folder by the rank that has written it. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    assert sorted(path for of_rank in told for path in of_rank) == sorted(path for path in folder.rglob("*") if path.is_file())
