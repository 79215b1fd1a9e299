from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from roll_lite.distributed.strategy.base import ExpertUse
from roll_lite.distributed.strategy.megatron.packed_rows import PackedRows
from roll_lite.distributed.strategy.megatron.routing import ChosenExperts
from roll_lite.models.hf_config import ExpertsConfig, HfConfig

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron-Core 0.16 defines this only with Transformer Engine, but always reads it


def experts_config(hf: HfConfig) -> dict[str, Any]:
    if hf.experts is None:
        return {}
    experts = hf.experts
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.feed_forward,
        # Softmax over the chosen experts equals the renormalized softmax over all.
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # our own balance loss instead
        # A list also makes Megatron's checkpoints treat the layers as different.
        "moe_layer_freq": 1 if all(experts.layers) else [int(sparse) for sparse in experts.layers],
    }


class Balance:
    """Expert use and load-balancing loss of an optimizer step.

    Loss per layer and row, as in Switch Transformer: number of experts * sum over experts of (share of choices * mean probability); 1 for
    even use. Rows stay whole, so micro-batches and ranks change no loss.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef
        self._rows = 1
        self._losses: list[torch.Tensor] = []
        self._choices: dict[int, torch.Tensor] = {}
        self._rerouted: list[torch.Tensor] = []

    def begin(self, rows: int) -> None:
        self._rows = max(rows, 1)
        self._losses, self._choices, self._rerouted = [], {}, []

    def count(self, layer: int, choices: torch.Tensor) -> None:
        self._choices[layer] = self._choices[layer] + choices if layer in self._choices else choices

    def add_rerouted(self, counts: torch.Tensor) -> None:
        self._rerouted.append(counts)

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """Record a layer's load-balancing loss, summed over a micro-batch's rows. Return its part of the objective: loss * coef / rows of
        the optimizer step."""
        self._losses.append(loss.detach())
        return loss * (self.coef / self._rows)

    def end(self, experts: ExpertsConfig, device: torch.device) -> ExpertUse:
        sums = torch.zeros(len(experts.layers) * experts.count + 3, dtype=torch.float64, device=device)
        choices = sums[:-3].view(len(experts.layers), experts.count)
        for layer, counted in self._choices.items():
            choices[layer] = counted
        if self._losses:
            sums[-1] = torch.stack(self._losses).sum()
        if self._rerouted:
            sums[-3:-1] = torch.stack(self._rerouted).sum(0)
        dist.all_reduce(sums)
        used = choices[torch.tensor(experts.layers, device=device)]
        busiest = (used.amax(1) / used.mean(1).clamp(min=1)).mean()
        loss = float(sums[-1]) / (self._rows * sum(experts.layers))
        replayed, rerouted = sums[-3:-1].tolist()
        return ExpertUse(float(busiest), loss if self.coef else None, rerouted / replayed if replayed else None)


class ExpertRouter(TopKRouter):
    rows: PackedRows

    def __init__(self, config: Any, pg_collection: Any, balance: Balance) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._balance = balance

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        routes, layer, frequency = self.rows.routes, self.layer_number - 1, self.config.moe_layer_freq
        number = layer if isinstance(frequency, int) else sum(frequency[:layer])  # among the layers with experts
        given = None if routes is None or routes.given is None else self._own(routes.given[:, number])
        replay = self.router_replay = None if routes is None else ChosenExperts(given)
        weights, chosen = super().routing(logits, padding_mask)
        if replay is not None and routes is not None and routes.taken is not None:
            routes.taken[number] = replay.chosen.to(torch.int16)
        if torch.is_grad_enabled():  # true once per micro-batch, even with recomputation
            weights = self._count(weights, chosen, logits.view(-1, self.num_experts))
        return weights, chosen

    def _own(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.chunk(self.tp_group.size())[self.tp_group.rank()] if self.config.sequence_parallel else tokens

    def _count(self, weights: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return routing weights with the balance loss's gradient attached. Padding (the last row) does not count."""
        rows, layer = self.rows, self.layer_number - 1
        row_of = self._own(rows.row_of)
        empty = logits.new_zeros(len(rows.lengths) + 1, self.num_experts)
        choices = empty.index_add(0, row_of, chosen.to(logits.dtype))[:-1]
        self._balance.count(layer, choices.sum(0))
        replay = self.router_replay
        if replay is not None and replay.given is not None:
            self._balance.add_rerouted(replay.rerouted())
        if not self._balance.coef:
            return weights
        if replay is not None:  # the balance loss uses the router's own choices, not the replayed ones
            ones = torch.ones_like(replay.own, dtype=logits.dtype)
            choices = empty.index_add(0, row_of, torch.zeros_like(logits).scatter(1, replay.own, ones))[:-1]
        if self.tp_cp_group.size() > 1:  # these ranks share the rows
            dist.all_reduce(choices, group=self.tp_cp_group)
        probabilities = empty.index_add(0, row_of, torch.softmax(logits, dim=-1))[:-1]
        scale = self.num_experts / (self.topk * rows.lengths.to(logits.dtype).square())
        weighted = self._balance.weighted(((choices * probabilities).sum(1) * scale).sum())
        result: torch.Tensor = moe_utils.MoEAuxLossAutoScaler.apply(weights, weighted)
        return result


class GroupedExperts(SequentialMLP):
    """SequentialMLP that computes all experts of a rank with one kernel, which on GPUs needs bfloat16 and widths divisible by 8."""

    def forward(self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not len(hidden) or (hidden.is_cuda and not self._fits_kernel(hidden)):
            output, _ = super().forward(hidden, tokens_per_expert, weights)
            return output, None
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        inner = _GroupedProduct.apply(hidden, ends, *(expert.linear_fc1.weight for expert in self.local_experts))
        inner = weighted_bias_swiglu_impl(inner, None, weights.unsqueeze(-1))
        return _GroupedProduct.apply(inner, ends, *(expert.linear_fc2.weight for expert in self.local_experts)), None

    def _fits_kernel(self, hidden: torch.Tensor) -> bool:
        first = self.local_experts[0]
        widths = (*first.linear_fc1.weight.shape, *first.linear_fc2.weight.shape)
        is_aligned = all(width % 8 == 0 for width in widths)
        return is_aligned and hidden.dtype == torch.bfloat16 and torch.cuda.get_device_capability(hidden.device) >= (8, 0)


class _GroupedProduct(torch.autograd.Function):
    """Product of each expert's tokens [tokens, in] with its weight [out, in], by one kernel. `ends`: index after each expert's tokens.
    Backward stacks the weights again to save memory."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, ends, *weights)
        return grouped_mm(inputs, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        inputs, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_inputs = grouped_mm(gradient, torch.stack(weights), offs=ends)
        of_weights = grouped_mm(gradient.t(), inputs, offs=ends)
        is_idle = ends.diff(prepend=ends.new_zeros(1)) == 0
        # Some kernels leave the gradient of an expert without tokens unwritten.
        return of_inputs, None, *of_weights.masked_fill_(is_idle[:, None, None], 0.0)


class Experts(MoELayer):
    """Mixture-of-experts layer. Recomputation restores the router's `rows` (packing layout), which later micro-batches overwrite."""

    router: ExpertRouter

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config, **options)
        self.moe_layer_recompute = False  # Megatron's recomputation would not set the rows
        self._recomputed = config.recompute_granularity == "selective" and "moe" in config.recompute_modules

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows, forward = self.router.rows, super().forward

        def with_rows(hidden_states: torch.Tensor) -> Any:
            self.router.rows = rows
            return forward(hidden_states, *args, **options)

        return tensor_parallel.checkpoint(with_rows, False, hidden_states) if self._recomputed else forward(hidden_states, *args, **options)


class ExpertsLayer(TransformerLayer):
    def forward(self, *args: Any, packed_seq_params: PackedRows, **options: Any) -> Any:
        self.mlp.router.rows = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)
