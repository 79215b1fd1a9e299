"""Rollouts on vLLM. Importing this package does not import vLLM, which reads its environment at import."""

from roll_lite.distributed.strategy.vllm.engine import VllmStrategy
from roll_lite.distributed.strategy.vllm.environment import engine_environment

__all__ = ["VllmStrategy", "engine_environment"]
