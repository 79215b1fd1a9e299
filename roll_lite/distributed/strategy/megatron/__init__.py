"""Training on Megatron-Core. Importing this package prepares megatron.core for machines without CUDA."""

from roll_lite.distributed.strategy.megatron import cpu_hook

cpu_hook.install()
