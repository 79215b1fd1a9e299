"""Record which experts tokens are routed to in one forward pass, and replay these routes in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

EXPERTS = "experts"
REPLAYED = ("old_experts", "rollout_experts")
"""Batch columns with routes to replay; a batch has at most one of them."""


@dataclass(frozen=True)
class Routes:
    """Routes (chosen experts) of this rank's tokens in a micro-batch.

    They travel with the micro-batch through the layers, because layers may be recomputed, and a pipeline stage runs several micro-batches
    before a backward pass. Megatron's RouterReplay cannot handle this: it keeps one list of routes, which passes must read in order."""

    places: torch.Tensor
    """[tokens] int64: index of each token in the whole micro-batch."""
    all_tokens: int
    """Number of tokens in the whole micro-batch, including padding."""
    given: torch.Tensor | None = None
    """Routes to replay: expert ids [tokens, expert layers, experts per token] int16. Where an id is -1, the router chooses. None: the
    router makes all choices."""
    taken: dict[int, torch.Tensor] | None = None
    """Recorded routes: index of the expert layer, from 0 -> expert ids [tokens, experts per token] int16. None: do not record."""

    def on_device(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Routes:
        return replace(self, places=to(self.places), given=None if self.given is None else to(self.given))


class ChosenExperts:
    """Expert choices of one router for one micro-batch. Given to Megatron's router in place of a RouterReplay."""

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
        """Return (scores, expert ids), both [tokens, experts per token]: replayed ids where given, else the router's own choice. Scores are
        the router's for these experts, so gradients reach it."""
        assert default_compute_topk is not None
        values, self.own = default_compute_topk(scores, topk, num_groups, group_topk)
        self.chosen = self.own
        if self.given is not None:
            self.chosen = torch.where(self.given >= 0, self.given.long(), self.own)
            values = scores.gather(1, self.chosen)
        return values, self.chosen

    def rerouted(self) -> torch.Tensor:
        """Return two counts [2]: replayed choices, and how many of them the router would not have made."""
        assert self.given is not None
        replayed = self.given >= 0
        other = (self.chosen[:, :, None] != self.own[:, None, :]).all(2)
        return torch.stack([replayed.sum(), (replayed & other).sum()])


def collect_routes(routes: Sequence[Routes], layers: int, per_token: int, sequence_parallel: bool) -> list[torch.Tensor]:
    """Collect the recorded routes of all ranks on the host: [all tokens, layers * per_token] int16 per micro-batch, including padding.
    Collective over the ranks of a model replica, since each has only some tokens and layers."""
    return [_collected(each, layers, per_token, sequence_parallel) for each in routes]


def _collected(routes: Routes, layers: int, per_token: int, sequence_parallel: bool) -> torch.Tensor:
    assert routes.taken is not None, "nobody asked for them"
    tensor: Any = parallel_state.get_tensor_model_parallel_group()
    places = routes.places.chunk(tensor.size())[tensor.rank()] if sequence_parallel else routes.places
    whole = torch.zeros(routes.all_tokens, layers, per_token, dtype=torch.int16, device=places.device)
    for layer, chosen in routes.taken.items():
        whole[places, layer] = chosen
    tokens = parallel_state.get_tensor_and_context_parallel_group() if sequence_parallel else parallel_state.get_context_parallel_group()
    for group in (tokens, parallel_state.get_pipeline_model_parallel_group()):
        if dist.get_world_size(group) > 1:  # no backend sums int16; summing bytes is safe, since each entry is 0 on all ranks but one
            dist.all_reduce(whole.view(torch.uint8), group=group)
    return whole.flatten(1).cpu()
