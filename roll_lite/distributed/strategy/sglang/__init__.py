"""Rollouts on SGLang. Importing this package does not import SGLang, which lives in processes of its own."""

from roll_lite.distributed.strategy.sglang.engine import SglangStrategy

__all__ = ["SglangStrategy"]
