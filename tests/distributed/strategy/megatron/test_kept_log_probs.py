"""Log-probs, entropy, distributions over the tokens that truncated sampling kept, against torch's log_softmax and autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_heads import HIDDEN, ROWS, VOCAB, HeadProblem, close, close_over_ranks
from megatron_ranks import RankPool

from roll_lite.distributed.strategy.megatron.log_probs import distribution, log_probs_and_entropy
from roll_lite.distributed.strategy.megatron.vocabulary import DROPPED, Vocabulary


@pytest.mark.parametrize("block_words", [1, 5, None])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(block_words: int | None, with_entropy: bool) -> None:
    problem = HeadProblem()
    theirs = problem.oracle(masked=True)
    ((theirs.log_probs * problem.weights).sum() + (theirs.entropy * problem.entropy_weights * with_entropy).sum()).backward()

    hidden, weight = problem.inputs()
    vocabulary = problem.vocabulary(kept=problem.kept, block_words=block_words)
    result, entropy = log_probs_and_entropy(hidden, weight, vocabulary, with_entropy)
    close(result, theirs.log_probs)
    loss = (result * problem.weights).sum()
    if entropy is not None:
        close(entropy, theirs.entropy)
        loss = loss + (entropy * problem.entropy_weights).sum()
    loss.backward()
    close(hidden.grad, theirs.hidden.grad)
    close(weight.grad, theirs.weight.grad)


def test_a_word_that_no_position_kept_has_no_gradient() -> None:
    problem = HeadProblem(vocab=90)
    problem.kept[(problem.kept < 0).all(dim=1), 0] = 0
    left_out = ~problem.keeps().any(dim=0)
    assert left_out.any()
    hidden, weight = problem.inputs()
    result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(kept=problem.kept), True)
    assert entropy is not None
    (result.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert weight.grad[left_out].abs().max() == 0


@pytest.mark.parametrize("block_words", [1, 5, None])
@pytest.mark.parametrize("masked", [False, True])
def test_distribution_beside_log_probs(block_words: int | None, masked: bool) -> None:
    problem = HeadProblem()
    theirs = problem.oracle(masked)
    whole = theirs.distribution
    assert bool(whole.isfinite().all())
    (((whole.exp() * whole) * problem.distribution_weights).sum() + (theirs.log_probs * problem.weights).sum()).backward()

    hidden, weight = problem.inputs()
    vocabulary = problem.vocabulary(kept=problem.kept if masked else None, block_words=block_words)
    own = distribution(hidden, weight, vocabulary)
    result, _ = log_probs_and_entropy(hidden, weight, vocabulary)
    close(own, whole)
    assert torch.equal(own == DROPPED, whole == DROPPED)
    (((own.exp() * own) * problem.distribution_weights).sum() + (result * problem.weights).sum()).backward()
    close(hidden.grad, theirs.hidden.grad)
    close(weight.grad, theirs.weight.grad)


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    problem = HeadProblem()
    hidden, weight = problem.inputs()
    padded = torch.cat([weight.detach(), torch.full((3, HIDDEN), 9.0)]).requires_grad_()
    for kept in (None, problem.kept):
        vocabulary = problem.vocabulary(share=VOCAB + 3, kept=kept)
        own = distribution(hidden, padded, vocabulary)
        assert own.shape == (ROWS, VOCAB)
        close(own, distribution(hidden, weight, problem.vocabulary(kept=kept)))
        (gradient,) = torch.autograd.grad((own * problem.distribution_weights).sum(), padded)
        assert gradient[VOCAB:].abs().max() == 0
        result, entropy = log_probs_and_entropy(hidden, padded, vocabulary, True)
        close(result, own.gather(1, problem.targets[:, None]).squeeze(1))
        close(entropy, -(own.exp() * own).sum(1))


@pytest.mark.parametrize("block_words", [1, 3])
def test_kept_tokens_far_below_the_others_do_not_vanish(block_words: int) -> None:
    """The softmax is shifted by the largest kept logit: by the largest of all, exp would be 0 for every kept one. The weight is the
    identity, so that the hidden states are the logits."""
    hidden = torch.tensor([[3e4, 0.0, -1.0], [0.0, -3e4, -3e4]]).requires_grad_()
    kept = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32)
    vocabulary = Vocabulary(3, 3, None, torch.tensor([1, 2]), torch.ones(2), kept, block_words)
    result, entropy = log_probs_and_entropy(hidden, torch.eye(3), vocabulary, True)
    close(result, torch.tensor([-0.3132617, -0.6931472]))
    assert entropy is not None
    close(entropy, torch.tensor([0.5822031, 0.6931472]))
    own = distribution(hidden, torch.eye(3), vocabulary)
    torch.testing.assert_close(own, torch.tensor([[DROPPED, -0.3132617, -1.3132617], [DROPPED, -0.6931472, -0.6931472]]))
    (result.sum() + entropy.sum() + (own.exp() * own**2).sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert hidden.grad[:, 0].abs().max() == 0


def test_no_rows_and_no_kept_tokens() -> None:
    weight, targets = torch.randn(7, HIDDEN), torch.zeros(0, dtype=torch.int64)
    hidden = torch.randn(0, HIDDEN).requires_grad_()
    empty = Vocabulary(7, 7, None, targets, torch.ones(0), torch.zeros(0, 3, dtype=torch.int32))
    assert log_probs_and_entropy(hidden, weight, empty)[0].shape == (0,)
    assert distribution(hidden, weight, empty).shape == (0, 7)
    problem = HeadProblem()
    nothing = problem.vocabulary(kept=torch.zeros(ROWS, 0, dtype=torch.int32))
    inputs = problem.inputs()
    close(log_probs_and_entropy(*inputs, nothing)[0], log_probs_and_entropy(*inputs, problem.vocabulary())[0])


def spread_vocabulary(vocab: int) -> None:
    """On each of the ranks: its share of the vocabulary gives the whole's values, and its share of the gradients."""
    group = dist.group.WORLD
    assert group is not None
    problem = HeadProblem(vocab)
    theirs = problem.oracle(masked=True)
    whole = theirs.distribution
    loss = (theirs.log_probs * problem.weights).sum() + (theirs.entropy * problem.entropy_weights).sum()
    (loss + ((whole.exp() * whole) * problem.distribution_weights).sum()).backward()

    share, mine, weight = problem.share_of(group)
    hidden, _ = problem.inputs()
    vocabulary = problem.vocabulary(share=share, group=group, kept=problem.kept, block_words=6)
    result, entropy = log_probs_and_entropy(hidden, weight, vocabulary, entropy=True)
    own = distribution(hidden, weight, vocabulary)
    close(result, theirs.log_probs)
    close(entropy, theirs.entropy)
    close(own, whole)
    assert entropy is not None
    own_loss = (result * problem.weights).sum() + (entropy * problem.entropy_weights).sum()
    (own_loss + ((own.exp() * own) * problem.distribution_weights).sum()).backward()
    close_over_ranks(hidden, weight, mine, theirs)


@pytest.mark.parametrize("vocab", [30, 29, 1])
def test_vocabulary_over_two_ranks(ranks: RankPool, vocab: int) -> None:
    ranks(2, spread_vocabulary, vocab)
