"""Where an engine says that tokens went, in the form in which trainers replay it."""

from __future__ import annotations

import numpy as np

from roll_lite.config.hf_config import ExpertsConfig


def chosen_experts(told: np.ndarray, experts: ExpertsConfig) -> np.ndarray:
    """[tokens, layers with experts x experts of a token] int16. `told` [tokens, layers, experts of a token]: of those layers, or of all."""
    if told.shape[1] == len(experts.layers):
        told = told[:, np.array(experts.layers)]
    assert told.shape[1:] == (sum(experts.layers), experts.per_token), f"the engine tells of {told.shape[1:]} experts of a token"
    return told.reshape(len(told), -1).astype(np.int16)
