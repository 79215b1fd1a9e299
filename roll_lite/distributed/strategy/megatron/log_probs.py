from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from roll_lite.distributed.strategy.megatron.vocabulary import DROPPED, HeadGradients, SoftmaxSums, Vocabulary

KEPT_LOGITS = 1 << 24
"""Maximum logits kept for backward (64 MiB in float32); above it, all are recomputed."""


def log_probs_and_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs of the targets and, with `entropy`, entropies of softmax(hidden @ weight.T / temperatures): [N] float32,
    differentiable, equal on all ranks.

    hidden [N, H], weight [V/tp, H]. All tensor-parallel ranks must compute the same loss. A rank's gradient of `hidden` covers its share of
    the vocabulary.
    """
    keep = torch.is_grad_enabled() and len(hidden) * len(weight) <= KEPT_LOGITS
    log_probs, entropies = _LogProbs.apply(hidden, weight, vocabulary, entropy, keep)
    return log_probs, entropies if entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary, entropy: bool, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sums = SoftmaxSums(vocabulary, entropy)
        ctx.logits = []
        for block, logits in vocabulary.logits(hidden, weight):
            ctx.logits += [(block, logits.clone())] if keep else []
            sums.add(block, logits)
        sums.add_ranks()
        # z: scaled logit minus the maximum, so that exp cannot overflow. The mean of z is sum_j(p_j z_j).
        log_sum, mean = sums.exponentials.log(), sums.weighted / sums.exponentials
        ctx.save_for_backward(hidden, weight, sums.largest, sums.exponentials, mean)
        ctx.vocabulary = vocabulary
        ctx.set_materialize_grads(False)
        return sums.target - sums.largest - log_sum, log_sum - mean if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, largest, exponentials, mean = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad)
        # d log p(y) / d z_j = [j = y] - p_j;  d H / d z_j = -p_j (log p_j + H) = -p_j (z_j - mean);  p_j = exp(z_j) / sum of exponentials
        scale = vocabulary.inverse_temperatures
        on_target = torch.zeros_like(scale) if grad_log_probs is None else grad_log_probs * scale
        slope = None if grad_entropy is None else -grad_entropy * scale / exponentials
        constant = -on_target / exponentials if slope is None else -on_target / exponentials - slope * mean
        kept, ctx.logits = ctx.logits, []  # the loop overwrites the logits
        for block, logits in kept or vocabulary.logits(hidden, weight):
            z = vocabulary.scaled(logits, largest)
            if slope is None:
                gradient = z.exp_().mul_(constant[:, None])
            else:
                gradient = z.exp().mul_(torch.addcmul(constant[:, None], z, slope[:, None], out=z))
            column, here = vocabulary.target_columns(block)
            gradient.scatter_add_(1, column, on_target[:, None] * here)
            gradients.add(block, gradient)
        return gradients.hidden, gradients.weight, None, None, None


def distribution(hidden: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return log_softmax(hidden @ weight.T / temperatures): [N, vocab_size] float32, differentiable, whole on every rank. Tokens outside a
    truncated softmax get DROPPED and no gradient."""
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
        # d sum_k(g_k log p_k) / d z_j = g_j - p_j sum_k(g_k), over the words in the softmax; z = logits / temperature
        own = (grad * vocabulary.inverse_temperatures[:, None]).masked_fill_(log_p == DROPPED, 0.0)
        total = own.sum(dim=1, keepdim=True)
        for block in vocabulary.blocks():
            columns = slice(vocabulary.start + block.start, vocabulary.start + block.stop)
            gradients.add(block, own[:, columns].addcmul_(log_p[:, columns].exp(), total, value=-1))
        return gradients.hidden, gradients.weight, None
