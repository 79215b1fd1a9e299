r"""Log-probs of the whole vocabulary, possibly split over tensor-parallel ranks, for losses that need more than the sampled token.

Unlike log_probs.py this takes N x V float32 numbers on every rank and gathers them: for small vocabularies or few rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from roll_lite.distributed.strategy.megatron.vocabulary import DROPPED, HeadGradients, SoftmaxSums, Vocabulary


def distribution(hidden: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    r"""log_softmax(hidden @ weight.T / temperatures): [N, vocab_size] float32, differentiable, equal on all ranks of the group.

    Tokens that sampling dropped have the log-prob DROPPED and no gradient. Arguments and gradients are those of log_probs_and_entropy.
    """
    result: torch.Tensor = _Distribution.apply(hidden, weight, vocabulary)
    return result


class _Distribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
        mine = torch.zeros(len(hidden), len(weight), device=hidden.device)
        sums = SoftmaxSums(vocabulary, entropy=False)
        for block, logits in vocabulary.logits(hidden, weight):
            mine[:, block] = logits
            sums.add(block, logits)
        sums.add_ranks()
        words = mine[:, : vocabulary.words]
        words.copy_(vocabulary.scaled(words, sums.largest, sums.exponentials.log()))
        everyone = [mine]
        if vocabulary.group is not None:
            everyone = [torch.empty_like(mine) for _ in range(vocabulary.group.size())]
            dist.all_gather(everyone, mine, group=vocabulary.group)
        log_p = torch.cat(everyone, dim=1)[:, : vocabulary.size].contiguous()
        ctx.save_for_backward(hidden, weight, log_p)
        ctx.vocabulary = vocabulary
        return log_p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, log_p = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad)
        # d sum_k(g_k log p_k) / d z_j = g_j - p_j sum_k(g_k), over the tokens that take part;  z = logits / temperature
        own = (grad * vocabulary.inverse_temperatures[:, None]).masked_fill_(log_p == DROPPED, 0.0)
        total = own.sum(dim=1, keepdim=True)
        for block in vocabulary.blocks():
            columns = slice(vocabulary.start + block.start, vocabulary.start + block.stop)
            gradients.add(block, own[:, columns].addcmul_(log_p[:, columns].exp(), total, value=-1))
        return gradients.hidden, gradients.weight, None
