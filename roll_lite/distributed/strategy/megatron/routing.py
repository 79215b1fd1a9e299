"""Routes of tokens to experts: recorded in one pass, replayed in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

EXPERTS = "experts"
REPLAYED = ("old_experts", "rollout_experts")
"""Columns with routes to replay; a batch has at most one."""


@dataclass(frozen=True)
class Routes:
    """Routes (chosen experts) of a rank's tokens in a micro-batch. They are passed to layers with the rows, because layers are recomputed
    and pipeline stages run several micro-batches before a backward pass. Megatron's RouterReplay cannot do that: it keeps one list, which
    passes must consume in order."""

    places: torch.Tensor
    """[tokens] int64: index among all ranks' tokens."""
    all_tokens: int
    """Number of all ranks' tokens, with padding."""
    given: torch.Tensor | None = None
    """Routes to replay, [tokens, expert layers, experts per token] int16. -1 leaves a choice to the router; None leaves all."""
    taken: dict[int, torch.Tensor] | None = None
    """Recorded routes by expert layer, from 0: [tokens, experts per token] int16. None: nothing is recorded."""

    def on_device(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Routes:
        return replace(self, places=to(self.places), given=None if self.given is None else to(self.given))


class ChosenExperts:
    """Choice of one router for one micro-batch, in place of Megatron's RouterReplay."""

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
        """Return (scores, experts), both [tokens, experts per token]. The router learns through the scores."""
        assert default_compute_topk is not None
        values, self.own = default_compute_topk(scores, topk, num_groups, group_topk)
        self.chosen = self.own
        if self.given is not None:
            self.chosen = torch.where(self.given >= 0, self.given.long(), self.own)
            values = scores.gather(1, self.chosen)
        return values, self.chosen

    def rerouted(self) -> torch.Tensor:
        """Counts [2]: replayed choices, and those of them that the router would not have made."""
        assert self.given is not None
        replayed = self.given >= 0
        other = (self.chosen[:, :, None] != self.own[:, None, :]).all(2)
        return torch.stack([replayed.sum(), (replayed & other).sum()])


def collect_routes(routes: Sequence[Routes], layers: int, per_token: int, sequence_parallel: bool) -> list[torch.Tensor]:
    """Recorded routes on the host: [all tokens, layers x per_token] int16 per micro-batch, with padding. Collective over the ranks of a
    model copy: each has some tokens and layers."""
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
        if dist.get_world_size(group) > 1:  # no back end sums int16; each entry is 0 on all ranks but one, so bytes never carry
            dist.all_reduce(whole.view(torch.uint8), group=group)
    return whole.flatten(1).cpu()
