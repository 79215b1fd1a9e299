"""Against torch's own log_softmax and autograd, on one rank and with the vocabulary spread over two."""

import pytest
import torch
import torch.distributed as dist
from megatron_ranks import RankPool

from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy

ROWS = 13
TEMPERATURES = torch.tensor([1.0, 0.7, 2.5, 0.05]).repeat(4)[:ROWS]


def problem(vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of very different sizes, targets, and the weights of a loss."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocab, generator=generator) * torch.logspace(-1, 1.5, ROWS)[:, None]
    targets = torch.randint(0, vocab, (ROWS,), generator=generator)
    return logits, targets, torch.randn(ROWS, generator=generator), torch.randn(ROWS, generator=generator)


def reference(logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor = TEMPERATURES) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = logits / temperatures[:, None]
    log_p = torch.log_softmax(scaled, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), torch.distributions.Categorical(logits=scaled).entropy()


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_elements", [1, 64, 1 << 24])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(chunk_elements: int, with_entropy: bool) -> None:
    logits, targets, weights, entropy_weights = problem(29)
    theirs = logits.clone().requires_grad_()
    log_p, entropy = reference(theirs, targets)
    ((log_p * weights).sum() + (entropy * entropy_weights * with_entropy).sum()).backward()

    ours = logits.clone().requires_grad_()
    result, own_entropy = log_probs_and_entropy(ours * 1, targets, TEMPERATURES, 29, None, with_entropy, chunk_elements)
    close(result, log_p)
    loss = (result * weights).sum()
    assert (own_entropy is not None) == with_entropy
    if own_entropy is not None:
        close(own_entropy, entropy)
        loss = loss + (own_entropy * entropy_weights).sum()
    loss.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    close(ours.grad, theirs.grad)


def test_gradient_of_the_entropy_alone() -> None:
    logits, targets, _, weights = problem(29)
    theirs, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (reference(theirs, targets)[1] * weights).sum().backward()
    entropy = log_probs_and_entropy(ours * 1, targets, TEMPERATURES, 29, None, True)[1]
    assert entropy is not None
    (entropy * weights).sum().backward()
    close(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_words_that_only_pad_the_vocabulary_count_for_nothing() -> None:
    logits, targets, weights, _ = problem(29)
    padded = torch.cat([logits, torch.full((ROWS, 3), 50.0)], dim=1).requires_grad_()
    result, entropy = log_probs_and_entropy(padded * 1, targets, TEMPERATURES, 29, None, True)
    log_p, expected_entropy = reference(logits, targets)
    close(result, log_p)
    close(entropy, expected_entropy)  # type: ignore[arg-type]
    (result * weights).sum().backward()
    assert padded.grad is not None
    assert padded.grad[:, 29:].abs().max() == 0


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-3e4, -3e4, -3e4]]).requires_grad_()
    result, entropy = log_probs_and_entropy(logits * 1, torch.tensor([1, 2]), torch.tensor([0.5, 2.0]), 3, None, True)
    close(result, torch.tensor([-2e4, -1.0986123]))
    close(entropy, torch.tensor([0.0, 1.0986123]))  # type: ignore[arg-type]
    (result.sum() + entropy.sum()).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits, targets, weights, _ = problem(29)
    low = logits.bfloat16().requires_grad_()
    result, _ = log_probs_and_entropy(low * 1, targets, TEMPERATURES, 29, None)
    close(result, reference(logits.bfloat16().float(), targets)[0])
    (result * weights).sum().backward()
    theirs = logits.bfloat16().float().requires_grad_()
    (reference(theirs, targets)[0] * weights).sum().backward()
    assert low.grad is not None
    close(low.grad.float(), theirs.grad, 1e-2)  # type: ignore[arg-type]


def test_no_rows() -> None:
    logits = torch.randn(0, 7).requires_grad_()
    result, entropy = log_probs_and_entropy(logits * 1, torch.zeros(0, dtype=torch.int64), torch.ones(0), 7, None, True)
    assert result.shape == entropy.shape == (0,)  # type: ignore[union-attr]
    (result.sum() + entropy.sum()).backward()  # type: ignore[union-attr]
    assert logits.grad is not None


def test_a_second_backward_pass_is_refused() -> None:
    logits, targets, _, _ = problem(5)
    result, _ = log_probs_and_entropy(logits.requires_grad_() * 1, targets, TEMPERATURES, 5, None)
    result.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten"):
        result.sum().backward()


def spread_vocabulary(vocab: int) -> None:
    """On each of the ranks: its columns of the vocabulary give the whole's values, and its columns of the gradient."""
    group = dist.group.WORLD
    assert group is not None
    share = -(-vocab // group.size())
    logits, targets, weights, entropy_weights = problem(vocab)
    theirs = logits.clone().requires_grad_()
    log_p, entropy = reference(theirs, targets)
    ((log_p * weights).sum() + (entropy * entropy_weights).sum()).backward()

    columns = slice(share * group.rank(), share * (group.rank() + 1))
    mine = torch.full((ROWS, share), 99.0)
    mine[:, : logits[:, columns].shape[1]] = logits[:, columns]
    mine.requires_grad_()
    result, own_entropy = log_probs_and_entropy(mine * 1, targets, TEMPERATURES, vocab, group, True, 32)
    assert own_entropy is not None
    close(result, log_p)
    close(own_entropy, entropy)
    ((result * weights).sum() + (own_entropy * entropy_weights).sum()).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    close(mine.grad[:, : logits[:, columns].shape[1]], theirs.grad[:, columns])


@pytest.mark.parametrize(("vocab", "world_size"), [(30, 2), (29, 2), (1, 2)])
def test_vocabulary_over_two_ranks(ranks: RankPool, vocab: int, world_size: int) -> None:
    ranks(world_size, spread_vocabulary, vocab)
