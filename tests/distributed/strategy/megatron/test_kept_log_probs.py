"""Log-probs, entropy, distributions over the tokens that truncated sampling kept, against torch's log_softmax and autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_ranks import RankPool

from roll_lite.distributed.strategy.megatron.distribution import distribution
from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy
from roll_lite.distributed.strategy.megatron.vocabulary import DROPPED

ROWS = 12
VOCAB = 29
TEMPERATURES = torch.tensor([1.0, 0.7, 1.7]).repeat(4)
"""Every kind of row has each of them."""


class Problem:
    """Rows that keep a few tokens, all of them (-1 alone), the target alone, and none of the target's."""

    def __init__(self, vocab: int = VOCAB, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(ROWS, vocab, generator=generator) * torch.logspace(-1, 1.5, ROWS)[:, None]
        self.targets = torch.randint(0, vocab, (ROWS,), generator=generator)
        self.weights, self.entropy_weights = torch.randn(2, ROWS, generator=generator)
        self.distribution_weights = torch.randn(ROWS, vocab, generator=generator)
        kept = torch.full((ROWS, 6), -1, dtype=torch.int32)
        for row in range(ROWS):
            if row % 4 == 1:
                continue
            others = torch.randperm(vocab, generator=generator)[: row % 6].tolist()
            tokens = [self.targets[row].item()] if row % 4 == 2 else [*others, *others[:1]]
            kept[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.kept = kept

    def keeps(self) -> torch.Tensor:
        """[rows, vocab] bool, in plain Python."""
        keeps = torch.zeros_like(self.logits, dtype=torch.bool)
        for row, tokens in enumerate(self.kept.tolist()):
            for token in range(keeps.shape[1]):
                keeps[row, token] = token in tokens or token == self.targets[row] or all(kept < 0 for kept in tokens)
        return keeps

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, log-probs, entropy, distribution, in float64."""
        logits = self.logits.double().requires_grad_()
        keeps = self.keeps()
        log_p = torch.log_softmax((logits / TEMPERATURES[:, None]).masked_fill(~keeps, -torch.inf), dim=-1).masked_fill(~keeps, DROPPED)
        return logits, log_p.gather(1, self.targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1), log_p


def close(ours: torch.Tensor | None, theirs: torch.Tensor | None, tolerance: float = 2e-5) -> None:
    assert ours is not None and theirs is not None
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_elements", [1, 64, 1 << 24])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(chunk_elements: int, with_entropy: bool) -> None:
    problem = Problem()
    theirs, log_p, entropy, _ = problem.oracle()
    ((log_p * problem.weights).sum() + (entropy * problem.entropy_weights * with_entropy).sum()).backward()

    ours = problem.logits.clone().requires_grad_()
    arguments = (ours * 1, problem.targets, TEMPERATURES, VOCAB, None, with_entropy, chunk_elements, problem.kept)
    result, own_entropy = log_probs_and_entropy(*arguments)
    close(result, log_p)
    loss = (result * problem.weights).sum()
    if own_entropy is not None:
        close(own_entropy, entropy)
        loss = loss + (own_entropy * problem.entropy_weights).sum()
    loss.backward()
    close(ours.grad, theirs.grad)
    assert ours.grad is not None
    assert ours.grad[~problem.keeps()].abs().max() == 0, "what was not kept has no gradient"


@pytest.mark.parametrize("chunk_elements", [1, 64, 1 << 24])
@pytest.mark.parametrize("masked", [False, True])
def test_distribution_beside_log_probs(chunk_elements: int, masked: bool) -> None:
    """Both on the same logits, whose memory the one overwrites in its backward pass."""
    problem = Problem()
    if not masked:
        problem.kept = torch.full((ROWS, 1), -1, dtype=torch.int32)
    theirs, log_p, _, whole = problem.oracle()
    assert bool(whole.isfinite().all())
    (((whole.exp() * whole) * problem.distribution_weights).sum() + (log_p * problem.weights).sum()).backward()

    ours = problem.logits.clone().requires_grad_()
    arguments = (ours * 1, problem.targets, TEMPERATURES, VOCAB, None)
    kept = problem.kept if masked else None
    own = distribution(*arguments, chunk_elements=chunk_elements, kept=kept)
    result, _ = log_probs_and_entropy(*arguments, chunk_elements=chunk_elements, kept=kept)
    close(own, whole)
    (((own.exp() * own) * problem.distribution_weights).sum() + (result * problem.weights).sum()).backward()
    close(ours.grad, theirs.grad)


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    problem = Problem()
    padded = torch.cat([problem.logits, torch.full((ROWS, 3), 50.0)], dim=1).requires_grad_()
    for kept in (None, problem.kept):
        own = distribution(padded * 1, problem.targets, TEMPERATURES, VOCAB, None, kept=kept)
        assert own.shape == (ROWS, VOCAB)
        close(own, distribution(problem.logits, problem.targets, TEMPERATURES, VOCAB, None, kept=kept))
        (gradient,) = torch.autograd.grad((own * problem.distribution_weights).sum(), padded)
        assert gradient[:, VOCAB:].abs().max() == 0
        result, entropy = log_probs_and_entropy(padded * 1, problem.targets, TEMPERATURES, VOCAB, None, True, kept=kept)
        close(result, own.gather(1, problem.targets[:, None]).squeeze(1))
        close(entropy, -(own.exp() * own).sum(1))


def test_kept_tokens_far_below_the_others_do_not_vanish() -> None:
    """The softmax is shifted by the largest kept logit: by the largest of all, exp would be 0 for every kept one."""
    logits = torch.tensor([[3e4, 0.0, -1.0], [0.0, -3e4, -3e4]]).requires_grad_()
    kept = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32)
    result, entropy = log_probs_and_entropy(logits * 1, torch.tensor([1, 2]), torch.ones(2), 3, None, True, kept=kept)
    close(result, torch.tensor([-0.3132617, -0.6931472]))
    assert entropy is not None
    close(entropy, torch.tensor([0.5822031, 0.6931472]))
    own = distribution(logits * 1, torch.tensor([1, 2]), torch.ones(2), 3, None, kept=kept)
    close(own, torch.tensor([[DROPPED, -0.3132617, -1.3132617], [DROPPED, -0.6931472, -0.6931472]]))
    (result.sum() + entropy.sum() + (own.exp() * own**2).sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[:, 0].abs().max() == 0


def test_no_rows_and_no_kept_tokens() -> None:
    logits, targets = torch.randn(0, 7).requires_grad_(), torch.zeros(0, dtype=torch.int64)
    result, _ = log_probs_and_entropy(logits * 1, targets, torch.ones(0), 7, None, kept=torch.zeros(0, 3, dtype=torch.int32))
    assert result.shape == (0,)
    assert distribution(logits, targets, torch.ones(0), 7, None).shape == (0, 7)
    problem = Problem()
    nothing = log_probs_and_entropy(
        problem.logits, problem.targets, TEMPERATURES, VOCAB, None, kept=torch.zeros(ROWS, 0, dtype=torch.int32)
    )[0]
    close(nothing, log_probs_and_entropy(problem.logits, problem.targets, TEMPERATURES, VOCAB, None)[0])


def spread_vocabulary(vocab: int) -> None:
    """On each of the ranks: its columns of the vocabulary give the whole's values, and its columns of the gradient."""
    group = dist.group.WORLD
    assert group is not None
    share = -(-vocab // group.size())
    problem = Problem(vocab)
    theirs, log_p, entropy, whole = problem.oracle()
    loss = (log_p * problem.weights).sum() + (entropy * problem.entropy_weights).sum()
    (loss + ((whole.exp() * whole) * problem.distribution_weights).sum()).backward()

    columns = slice(share * group.rank(), share * (group.rank() + 1))
    mine = torch.full((ROWS, share), 99.0)
    mine[:, : problem.logits[:, columns].shape[1]] = problem.logits[:, columns]
    mine.requires_grad_()
    arguments = (mine * 1, problem.targets, TEMPERATURES, vocab, group)
    result, own_entropy = log_probs_and_entropy(*arguments, entropy=True, chunk_elements=32, kept=problem.kept)
    own = distribution(*arguments, chunk_elements=32, kept=problem.kept)
    close(result, log_p)
    close(own_entropy, entropy)
    close(own, whole)
    assert own_entropy is not None
    own_loss = (result * problem.weights).sum() + (own_entropy * problem.entropy_weights).sum()
    (own_loss + ((own.exp() * own) * problem.distribution_weights).sum()).backward()
    assert mine.grad is not None and theirs.grad is not None
    words = problem.logits[:, columns].shape[1]
    close(mine.grad[:, :words], theirs.grad[:, columns])
    assert mine.grad[:, words:].abs().sum() == 0


@pytest.mark.parametrize("vocab", [30, 29, 1])
def test_vocabulary_over_two_ranks(ranks: RankPool, vocab: int) -> None:
    ranks(2, spread_vocabulary, vocab)
