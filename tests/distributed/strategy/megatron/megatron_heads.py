"""Hidden states, output weights and their softmaxes, with whole logits in float64 as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from roll_lite.distributed.strategy.megatron.vocabulary import DROPPED, Vocabulary

ROWS, HIDDEN, VOCAB = 12, 8, 29


@dataclass(frozen=True)
class Oracle:
    """Leaves and what follows from them, in float64."""

    hidden: torch.Tensor
    weight: torch.Tensor
    logits: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor
    distribution: torch.Tensor


class HeadProblem:
    """Logits of very different sizes, and the weights of a loss. In `kept`, rows that keep a few tokens, all of them (-1 alone), the target
    alone, and none of the target's; every kind has every temperature."""

    def __init__(self, vocab: int = VOCAB, seed: int = 0, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.rows = vocab, rows
        self.hidden = torch.randn(rows, HIDDEN, generator=generator) * torch.logspace(-1, 1.5, rows)[:, None]
        self.weight = torch.randn(vocab, HIDDEN, generator=generator) / HIDDEN**0.5
        self.targets = torch.randint(0, vocab, (rows,), generator=generator)
        self.temperatures = torch.tensor([1.0, 0.7, 1.7]).repeat(rows)[:rows]
        self.weights, self.entropy_weights = torch.randn(2, rows, generator=generator)
        self.distribution_weights = torch.randn(rows, vocab, generator=generator)
        self.kept = torch.full((rows, 6), -1, dtype=torch.int32)
        for row in range(rows):
            if row % 4 == 1:
                continue
            others = torch.randperm(vocab, generator=generator)[: row % 6].tolist()
            tokens = [self.targets[row].item()] if row % 4 == 2 else [*others, *others[:1]]
            self.kept[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()

    def vocabulary(self, share: int | None = None, group: dist.ProcessGroup | None = None, **options: Any) -> Vocabulary:
        return Vocabulary(share or self.vocab, self.vocab, group, self.targets, self.temperatures, **options)

    def share_of(self, group: dist.ProcessGroup) -> tuple[int, slice, torch.Tensor]:
        """How many words each rank has, which ones are this rank's, and its weight, padded with what must not count."""
        share = -(-self.vocab // group.size())
        mine = slice(share * group.rank(), share * (group.rank() + 1))
        weight = torch.full((share, HIDDEN), 99.0)
        weight[: len(self.weight[mine])] = self.weight[mine]
        return share, mine, weight.requires_grad_()

    def keeps(self) -> torch.Tensor:
        """[rows, vocab] bool, in plain Python."""
        keeps = torch.zeros(self.rows, self.vocab, dtype=torch.bool)
        for row, tokens in enumerate(self.kept.tolist()):
            for token in range(self.vocab):
                keeps[row, token] = token in tokens or token == self.targets[row] or all(kept < 0 for kept in tokens)
        return keeps

    def oracle(self, masked: bool = False, logits: torch.Tensor | None = None) -> Oracle:
        """`logits` are a leaf of their own where they are given."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        found = hidden @ weight.t() if logits is None else logits.requires_grad_()
        keeps = self.keeps() if masked else torch.ones(self.rows, self.vocab, dtype=torch.bool)
        log_p = torch.log_softmax((found / self.temperatures[:, None]).masked_fill(~keeps, -torch.inf), dim=-1)
        log_p = log_p.masked_fill(~keeps, DROPPED)
        log_probs = log_p.gather(1, self.targets[:, None]).squeeze(1)
        return Oracle(hidden, weight, found, log_probs, -(log_p.exp() * log_p).sum(1), log_p)


def close(ours: torch.Tensor | None, theirs: torch.Tensor | None, tolerance: float = 2e-5) -> None:
    """Relative to the largest entry: sums over positions cancel."""
    assert ours is not None and theirs is not None
    size = float(theirs.detach().abs().max()) if theirs.dim() > 1 and len(theirs) else 1.0
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * max(1.0, size))


def close_over_ranks(hidden: torch.Tensor, weight: torch.Tensor, mine: slice, theirs: Oracle) -> None:
    """Gradients: each rank has those of its own words, and the words that only make the shares equal have none; that of the hidden states
    is the ranks' sum."""
    assert hidden.grad is not None and weight.grad is not None and theirs.weight.grad is not None
    words = len(theirs.weight.grad[mine])
    close(weight.grad[:words], theirs.weight.grad[mine])
    assert weight.grad[words:].abs().sum() == 0
    dist.all_reduce(hidden.grad)
    close(hidden.grad, theirs.hidden.grad)


class NoMatrix(TorchDispatchMode):
    """Fails on any tensor of that many elements or more."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                assert tensor.untyped_storage().nbytes() // tensor.element_size() < self._elements, f"{func} made {tuple(tensor.shape)}"
        return result
