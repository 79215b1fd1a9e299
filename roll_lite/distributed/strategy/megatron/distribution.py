"""The log-probs of a whole vocabulary that is spread over tensor-parallel ranks, for terms that need more than the sampled token.

Unlike log_probs.py this costs N x V float32 numbers on every rank, and gathers them: for small vocabularies or few rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll_lite.distributed.strategy.megatron.vocabulary import CHUNK_ELEMENTS, DROPPED, Vocabulary, rows_at_a_time


def distribution(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    chunk_elements: int = CHUNK_ELEMENTS,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """log_softmax(logits / temperatures), [N, vocab_size] float32 and differentiable, the same on every rank of the group.

    Tokens that were not kept have the log-prob DROPPED and no gradient. The arguments are those of log_probs_and_entropy, which may
    be used beside it on the same logits. As there, every rank computes the same loss, so that no gradient travels.
    """
    result: torch.Tensor = _Distribution.apply(
        logits, targets, temperatures, vocab_size, group, rows_at_a_time(logits, chunk_elements), kept
    )
    return result


class _Distribution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk: int,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        vocabulary = Vocabulary(logits, targets, temperatures, vocab_size, group, kept)
        largest = vocabulary.largest(chunk)
        sums = torch.zeros_like(largest)
        for part in vocabulary.chunks(chunk):
            sums[part] = vocabulary.scaled(part, largest).exp_().sum(dim=1)
        vocabulary.reduce(sums, dist.ReduceOp.SUM)

        sums.log_()
        mine = torch.zeros(logits.shape, device=logits.device)
        for part in vocabulary.chunks(chunk):
            mine[part, : vocabulary.size] = vocabulary.scaled(part, largest, sums)
        everyone = [mine]
        if vocabulary.group is not None:
            everyone = [torch.empty_like(mine) for _ in range(vocabulary.group.size())]
            dist.all_gather(everyone, mine, group=vocabulary.group)
        log_p = torch.cat(everyone, dim=1)[:, :vocab_size].contiguous()
        ctx.save_for_backward(log_p, temperatures)
        ctx.columns, ctx.shape, ctx.dtype, ctx.chunk = (
            slice(vocabulary.start, vocabulary.start + vocabulary.size),
            logits.shape,
            logits.dtype,
            chunk,
        )
        return log_p

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        log_p, temperatures = ctx.saved_tensors
        result = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        for start in range(0, len(grad), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            # d sum_k(g_k log p_k) / d z_j = g_j - p_j sum_k(g_k), over the tokens that take part
            own = grad[part].masked_fill(log_p[part] == DROPPED, 0.0)
            p = log_p[part, ctx.columns].exp()
            mine = own[:, ctx.columns] - p * own.sum(dim=1, keepdim=True)
            result[part, : mine.shape[1]] = mine.div_(temperatures[part, None]).to(ctx.dtype)
        return result, None, None, None, None, None, None
