"""Advantage estimators as a user would write them, right ones and wrong ones."""

import torch

from roll_lite.workers.credit_inputs import CreditInputs


def above_best_of_batch(inputs: CreditInputs, scale: float = 1.0) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """[rows], from a number of the whole batch; with a critic its targets as well."""
    everyone = inputs.everyone
    found = scale * (everyone.rewards - everyone.rewards.max())[everyone.local] if len(inputs.reward) else torch.zeros(0)
    return found if inputs.values is None else (found, inputs.reward)


def alone(inputs: CreditInputs) -> torch.Tensor:
    return inputs.reward


def reward_per_token(inputs: CreditInputs) -> torch.Tensor:
    """[rows, T-1], with garbage where the mask is 0."""
    return torch.where(inputs.mask, inputs.reward[:, None] / inputs.policy_tokens[:, None], torch.nan)


def token_rewards_without(inputs: CreditInputs, offset: float) -> torch.Tensor:
    """[rows, T-1], the offset taken off the last column."""
    assert inputs.token_rewards.dtype == torch.float64
    rewards = inputs.token_rewards.clone()
    rewards[:, -1] -= offset
    return rewards


def what_it_was_told(inputs: CreditInputs) -> torch.Tensor:
    assert inputs.token_rewards.shape == inputs.mask.shape and inputs.values is None
    assert inputs.truncated.dtype == torch.bool and inputs.groups.dtype == torch.int64
    assert torch.equal(inputs.everyone.groups[inputs.everyone.local], inputs.groups)
    assert torch.equal(inputs.everyone.policy_tokens[inputs.everyone.local], inputs.policy_tokens)
    return inputs.train_weight


def too_short(inputs: CreditInputs) -> torch.Tensor:
    return torch.zeros(len(inputs.reward) + 1)


def not_a_number(inputs: CreditInputs) -> torch.Tensor:
    return torch.full_like(inputs.reward, torch.nan)


def a_list(inputs: CreditInputs) -> list[float]:
    return inputs.reward.tolist()
