from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

EXPERTS = "experts"
REPLAYED = ("old_experts", "rollout_experts")
"""Batch columns with expert choices to replay; at most one per batch."""


@dataclass(frozen=True)
class Routes:
    """Expert choices of this rank's tokens, kept with their micro-batch: layers may be recomputed and pipeline stages interleave
    micro-batches, which Megatron's RouterReplay does not support."""

    places: torch.Tensor
    """[tokens] int64: index of this rank's tokens in the whole micro-batch."""
    all_tokens: int
    """Tokens in the whole micro-batch, with padding."""
    given: torch.Tensor | None = None
    """Expert ids to replay [tokens, expert layers, experts per token] int16; the router chooses where -1."""
    taken: dict[int, torch.Tensor] | None = None
    """Recorded choices, {expert layer: ids [tokens, experts per token] int16}. None: do not record."""

    def on_device(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Routes:
        return replace(self, places=to(self.places), given=None if self.given is None else to(self.given))


class ChosenExperts:
    """Expert choices of one router and micro-batch; replaces Megatron's RouterReplay."""

    def __init__(self, given: torch.Tensor | None) -> None:
        self.given = given

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, expert ids), both [tokens, experts per token]. Replayed ids are scored too: the router gets gradients."""
        assert default_compute_topk is not None
        values, self.own = default_compute_topk(scores, topk, num_groups, group_topk)
        self.chosen = self.own
        if self.given is not None:
            self.chosen = torch.where(self.given >= 0, self.given.long(), self.own)
            values = scores.gather(1, self.chosen)
        return values, self.chosen

    def rerouted(self) -> torch.Tensor:
        """Return [number of replayed expert choices, number of these that the router itself would not have made]."""
        assert self.given is not None
        replayed = self.given >= 0
        other = (self.chosen[:, :, None] != self.own[:, None, :]).all(2)
        return torch.stack([replayed.sum(), (replayed & other).sum()])


def collect_routes(routes: Routes, layers: int, per_token: int, sequence_parallel: bool) -> torch.Tensor:
    """Gather recorded expert ids on the host (collective over a model replica): [all tokens, layers * per_token] int16."""
    assert routes.taken is not None, "no routes were recorded"
    tensor: Any = parallel_state.get_tensor_model_parallel_group()
    places = routes.places.chunk(tensor.size())[tensor.rank()] if sequence_parallel else routes.places
    whole = torch.zeros(routes.all_tokens, layers, per_token, dtype=torch.int16, device=places.device)
    for layer, chosen in routes.taken.items():
        whole[places, layer] = chosen
    tokens = parallel_state.get_tensor_and_context_parallel_group() if sequence_parallel else parallel_state.get_context_parallel_group()
    for group in (tokens, parallel_state.get_pipeline_model_parallel_group()):
        if dist.get_world_size(group) > 1:  # no backend sums int16; bytes can be summed, since each entry is 0 on all ranks but one
            dist.all_reduce(whole.view(torch.uint8), group=group)
    return whole.flatten(1).cpu()
