"""Device of this rank: a GPU, or the CPU without one."""

from __future__ import annotations

import os

import torch


def take_local_device() -> torch.device:
    """Make the GPU that LOCAL_RANK names the current one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return current_device()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
