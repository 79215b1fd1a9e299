"""Rollouts on vLLM. Importing this package does not import vLLM, which reads its environment at import."""

from roll_lite.distributed.strategy.vllm.compat.environment import engine_environment
from roll_lite.distributed.strategy.vllm.engine import VllmStrategy

__all__ = ["VllmStrategy", "engine_environment"]
