"""Against torch's own log_softmax and autograd on whole logits in float64, on one rank and with the vocabulary spread over two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_heads import HeadProblem, NoMatrix, close, close_over_ranks
from megatron_ranks import RankPool

from roll_lite.distributed.strategy.megatron import log_probs
from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy
from roll_lite.distributed.strategy.megatron.vocabulary import Vocabulary


def losses(problem: HeadProblem, log_p: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    loss = (log_p * problem.weights).sum()
    return loss if entropy is None else loss + (entropy * problem.entropy_weights).sum()


@pytest.fixture(params=["kept", "multiplied again"])
def logits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the backward pass: few are kept, many are not."""
    if request.param == "multiplied again":
        monkeypatch.setattr(log_probs, "KEPT_LOGITS", 0)


@pytest.mark.usefixtures("logits")
@pytest.mark.parametrize("block_words", [1, 5, None])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(block_words: int | None, with_entropy: bool) -> None:
    problem = HeadProblem()
    theirs = problem.oracle()
    losses(problem, theirs.log_probs, theirs.entropy if with_entropy else None).backward()
    hidden, weight = problem.inputs()
    result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(block_words=block_words), with_entropy)
    close(result, theirs.log_probs)
    assert (entropy is not None) == with_entropy
    if entropy is not None:
        close(entropy, theirs.entropy)
    losses(problem, result, entropy).backward()
    close(hidden.grad, theirs.hidden.grad)
    close(weight.grad, theirs.weight.grad)


@pytest.mark.usefixtures("logits")
def test_two_backward_passes() -> None:
    """The first one writes over the logits that were kept."""
    problem = HeadProblem()
    hidden, weight = problem.inputs()
    loss = losses(problem, *log_probs_and_entropy(hidden, weight, problem.vocabulary(), True))
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    for mine, other in zip(first, second, strict=True):
        close(mine, other)


def test_blocks_change_nothing() -> None:
    problem = HeadProblem()
    problem.hidden /= 10  # the products of blocks are rounded differently, which counts for more the larger the logits are
    found = []
    for block_words in (1, 4, 7, 29):
        hidden, weight = problem.inputs()
        result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(block_words=block_words), True)
        losses(problem, result, entropy).backward()
        found.append((result, entropy, hidden.grad, weight.grad))
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            close(mine, first, 1e-6)


def test_gradient_of_the_entropy_alone() -> None:
    problem = HeadProblem()
    theirs = problem.oracle()
    (theirs.entropy * problem.entropy_weights).sum().backward()
    hidden, weight = problem.inputs()
    entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(), True)[1]
    assert entropy is not None
    (entropy * problem.entropy_weights).sum().backward()
    close(hidden.grad, theirs.hidden.grad)
    close(weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    problem = HeadProblem()
    theirs = problem.oracle()
    losses(problem, theirs.log_probs, None).backward()
    inputs = problem.inputs()
    inputs[frozen].requires_grad_(False)
    losses(problem, log_probs_and_entropy(*inputs, problem.vocabulary())[0], None).backward()
    assert inputs[frozen].grad is None
    close(inputs[1 - frozen].grad, (theirs.weight if frozen == 0 else theirs.hidden).grad)


def test_words_that_only_pad_the_vocabulary_count_for_nothing() -> None:
    problem = HeadProblem()
    theirs = problem.oracle()
    losses(problem, theirs.log_probs, theirs.entropy).backward()
    hidden, weight = problem.inputs()
    padded = torch.cat([weight.detach(), torch.full((3, weight.shape[1]), 9.0)]).requires_grad_()
    result, entropy = log_probs_and_entropy(hidden, padded, problem.vocabulary(share=len(padded)), True)
    close(result, theirs.log_probs)
    close(entropy, theirs.entropy)
    losses(problem, result, entropy).backward()
    assert padded.grad is not None
    close(padded.grad[: problem.vocab], theirs.weight.grad)
    assert padded.grad[problem.vocab :].abs().max() == 0
    close(hidden.grad, theirs.hidden.grad)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    """The hidden states are the logits: the weight is the identity."""
    hidden = torch.tensor([[1e4, 0.0, -1e4], [-3e4, -3e4, -3e4]]).requires_grad_()
    for block_words in (1, 3):
        vocabulary = Vocabulary(3, 3, None, torch.tensor([1, 2]), torch.tensor([0.5, 2.0]), block_words=block_words)
        result, entropy = log_probs_and_entropy(hidden, torch.eye(3), vocabulary, True)
        close(result, torch.tensor([-2e4, -1.0986123]))
        close(entropy, torch.tensor([0.0, 1.0986123]))
        assert entropy is not None
        (gradient,) = torch.autograd.grad(result.sum() + entropy.sum(), hidden)
        assert gradient.isfinite().all()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    problem = HeadProblem()
    hidden, weight = (tensor.detach().bfloat16().requires_grad_() for tensor in problem.inputs())
    theirs = problem.oracle(logits=(hidden.detach() @ weight.detach().t()).double())
    result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(block_words=8), True)
    close(result, theirs.log_probs)
    close(entropy, theirs.entropy)
    losses(problem, result, entropy).backward()
    (of_logits,) = torch.autograd.grad(losses(problem, theirs.log_probs, theirs.entropy), theirs.logits)
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for mine, whole in ((hidden.grad, of_logits @ weight.detach().double()), (weight.grad, of_logits.t() @ hidden.detach().double())):
        assert (mine.double() - whole).norm() < 5e-3 * whole.norm()


def test_no_rows() -> None:
    hidden, weight = torch.randn(0, 4).requires_grad_(), torch.randn(7, 4).requires_grad_()
    vocabulary = Vocabulary(7, 7, None, torch.zeros(0, dtype=torch.int64), torch.ones(0))
    result, entropy = log_probs_and_entropy(hidden, weight, vocabulary, True)
    assert entropy is not None
    assert result.shape == entropy.shape == (0,)
    (result.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None, "a rank without rows keeps step with those that reduce gradients"
    assert weight.grad.abs().max() == 0


def test_nothing_of_the_size_of_many_logits_is_made_or_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "KEPT_LOGITS", 1000)
    rows, vocab = 64, 1000
    problem = HeadProblem(vocab, rows=rows)
    hidden, weight = problem.inputs()
    for kept in (None, problem.kept):
        with NoMatrix(rows * vocab // 2):
            result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(kept=kept, block_words=100), True)
            losses(problem, result, entropy).backward()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("saved without need"), lambda _: None):
        result, _ = log_probs_and_entropy(hidden, weight, problem.vocabulary(), True)
    assert not result.requires_grad


def test_runs_are_alike_bit_for_bit() -> None:
    problem = HeadProblem()
    runs = []
    for _ in range(2):
        hidden, weight = problem.inputs()
        result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(block_words=8), True)
        losses(problem, result, entropy).backward()
        runs.append((result, entropy, hidden.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))  # type: ignore[arg-type]


def spread_vocabulary(vocab: int) -> None:
    """On each of the ranks: its share of the vocabulary gives the whole's values, and its share of the gradients."""
    group = dist.group.WORLD
    assert group is not None
    problem = HeadProblem(vocab)
    theirs = problem.oracle()
    losses(problem, theirs.log_probs, theirs.entropy).backward()
    share, mine, weight = problem.share_of(group)
    hidden, _ = problem.inputs()
    result, entropy = log_probs_and_entropy(hidden, weight, problem.vocabulary(share=share, group=group, block_words=6), True)
    close(result, theirs.log_probs)
    close(entropy, theirs.entropy)
    losses(problem, result, entropy).backward()
    close_over_ranks(hidden, weight, mine, theirs)


@pytest.mark.parametrize(("vocab", "world_size"), [(30, 2), (29, 2), (1, 2)])
def test_vocabulary_over_two_ranks(ranks: RankPool, vocab: int, world_size: int) -> None:
    ranks(world_size, spread_vocabulary, vocab)
