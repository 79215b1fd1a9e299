"""Which experts tokens go to: recorded in one pass, replayed in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

EXPERTS = "experts"
"""The output of a forward pass that says where its tokens went."""
REPLAYED = ("old_experts", "rollout_experts")
"""The columns that say where tokens have to go; a batch has one of them at most."""


@dataclass(frozen=True)
class Routes:
    """Of the tokens of a micro-batch that a rank has. They go through the layers with its rows, so that layers that are computed again, and
    pipeline stages that are several micro-batches ahead of their gradients, find those of the right tokens: the targets of Megatron's own
    RouterReplay are a list that passes must use up in its order."""

    places: torch.Tensor
    """[tokens] int64: where each of them lies among those of all ranks."""
    all_tokens: int
    """Of all ranks, padding included."""
    given: torch.Tensor | None = None
    """[tokens, layers with experts, experts of a token] int16, to be replayed; -1: as the router chooses. None: it always does."""
    taken: dict[int, torch.Tensor] | None = None
    """Where they went, [tokens, experts of a token] int16 by layer with experts, counted from 0. None: nobody asks."""

    def on_device(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Routes:
        return replace(self, places=to(self.places), given=None if self.given is None else to(self.given))


class ChosenExperts:
    """One router's choice for one micro-batch, in the place of Megatron's RouterReplay."""

    def __init__(self, given: torch.Tensor | None) -> None:
        """`given` [tokens, experts of a token]."""
        self.given = given

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the chosen, through which the router learns, and the chosen; [tokens, experts of a token] both."""
        assert default_compute_topk is not None
        values, self.own = default_compute_topk(scores, topk, num_groups, group_topk)
        self.chosen = self.own
        if self.given is not None:
            self.chosen = torch.where(self.given >= 0, self.given.long(), self.own)
            values = scores.gather(1, self.chosen)
        return values, self.chosen

    def rerouted(self) -> torch.Tensor:
        """[2]: how many of the choices were replayed, and how many of these the router would not have made."""
        assert self.given is not None
        replayed = self.given >= 0
        other = (self.chosen[:, :, None] != self.own[:, None, :]).all(2)
        return torch.stack([replayed.sum(), (replayed & other).sum()])


def collect_routes(routes: Sequence[Routes], layers: int, per_token: int, sequence_parallel: bool) -> list[torch.Tensor]:
    """Those that were taken, on the host: [all tokens, layers x per_token] int16 of every micro-batch, padding included. Collective over
    the ranks of a copy of the model: each has some of the tokens and some of the layers."""
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
        if dist.get_world_size(group) > 1:  # no back end adds int16; what one rank has is 0 on the others, and bytes never carry
            dist.all_reduce(whole.view(torch.uint8), group=group)
    return whole.flatten(1).cpu()
