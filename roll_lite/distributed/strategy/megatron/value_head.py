"""The critic's head: one number per position, replicated over tensor ranks.

In Hugging Face's naming it is `score.weight` [1, hidden] of a sequence-classification model with one label. A value model is saved
under that name, so that transformers loads it and a reward model's checkpoint can become a critic.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from roll_lite.distributed.strategy.megatron.device import current_device

ValueInit = Literal["actor", "reward_model", "path"]
"""Where a critic's weights come from (CriticRoleConfig.init): a base model, whose head starts at zero, so that all values start at 0;
or a checkpoint with its own head, be it a reward model's or one that save_hf wrote."""

HF_NAME = "score.weight"


class ValueHead(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to [N] float32; the product is taken in float32, values are regressed on."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()).squeeze(-1)
