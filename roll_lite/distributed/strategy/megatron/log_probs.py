"""Log-probabilities and entropy of logits whose vocabulary is spread over tensor-parallel ranks.

Works through the rows in chunks, so that float32 copies stay small whatever the vocabulary; ranks exchange a few numbers per row,
never logits. The backward pass writes the gradient over the logits, which nobody needs any more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll_lite.distributed.strategy.megatron.vocabulary import CHUNK_ELEMENTS, Vocabulary, rows_at_a_time


def log_probs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of softmax(logits / temperatures), both [N] float32 and differentiable.

    For logits [N, V/tp], targets [N], temperatures [N], vocab_size and kept [N, K] see Vocabulary. The gradient, 0 for tokens that were not
    kept, overwrites the logits: use them for nothing else.
    """
    chunk = rows_at_a_time(logits, chunk_elements)
    log_probs, entropies = _LogProbs.apply(logits, targets, temperatures, vocab_size, group, entropy, chunk, kept)
    return log_probs, entropies if entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        entropy: bool,
        chunk: int,
        kept: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        vocabulary = Vocabulary(logits, targets, temperatures, vocab_size, group, kept)
        largest = vocabulary.largest(chunk)

        # Per row, relative to the largest logit: sum of exponentials, the target's logit, and for the entropy sum(exp(z) * z).
        sums = torch.zeros(3 if entropy else 2, len(logits), device=logits.device)
        column, here = vocabulary.target_columns()
        for part in vocabulary.chunks(chunk):
            scaled = vocabulary.scaled(part, largest)
            sums[1, part] = scaled.gather(1, column[part, None]).squeeze(1)
            exponentials = scaled.exp()
            sums[0, part] = exponentials.sum(dim=1)
            if entropy:
                sums[2, part] = exponentials.mul_(scaled).sum(dim=1)
        sums[1].mul_(here)
        vocabulary.reduce(sums, dist.ReduceOp.SUM)

        log_normalizer = sums[0].log()
        log_probs = sums[1] - log_normalizer
        entropies = log_normalizer - sums[2] / sums[0] if entropy else None
        ctx.save_for_backward(logits, targets, temperatures, kept, largest.add_(log_normalizer), entropies)
        ctx.vocab_size, ctx.group, ctx.chunk, ctx.spent = vocab_size, group, chunk, False
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        assert not ctx.spent, "the logits were overwritten by the first backward pass"
        ctx.spent = True
        logits, targets, temperatures, kept, log_normalizer, entropies = ctx.saved_tensors
        vocabulary = Vocabulary(logits, targets, temperatures, ctx.vocab_size, ctx.group, kept)
        column, here = vocabulary.target_columns()
        logits[:, vocabulary.size :].zero_()
        for part in vocabulary.chunks(ctx.chunk):
            log_p = vocabulary.scaled(part, log_normalizer)
            p = log_p.exp()
            # d log p(y) / d z_j = [j = y] - p_j;  d H / d z_j = -p_j (log p_j + H)
            factor = torch.zeros_like(log_normalizer[part, None])
            if grad_log_probs is not None:
                factor = factor - grad_log_probs[part, None]
            if grad_entropy is not None:
                factor = factor - grad_entropy[part, None] * log_p.add_(entropies[part, None])
            grad = p.mul_(factor)
            if grad_log_probs is not None:
                grad.scatter_add_(1, column[part, None], (grad_log_probs[part] * here[part])[:, None])
            vocabulary.words[part] = grad.div_(temperatures[part, None])
        return logits, None, None, None, None, None, None, None
