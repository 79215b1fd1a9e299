"""Expert choices that an engine reports, in the form that trainers replay."""

from __future__ import annotations

import numpy as np

from roll_lite.models.hf_config import ExpertsConfig


def chosen_experts(told: np.ndarray, experts: ExpertsConfig) -> np.ndarray:
    """[tokens, expert layers x experts per token] int16 from `told` [tokens, layers, experts per token], which covers expert layers or
    all layers."""
    if told.shape[1] == len(experts.layers):
        told = told[:, np.array(experts.layers)]
    assert told.shape[1:] == (sum(experts.layers), experts.per_token), f"the engine tells of {told.shape[1:]} experts of a token"
    return told.reshape(len(told), -1).astype(np.int16)
