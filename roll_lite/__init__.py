"""RL with verifiable rewards: Megatron-Core training, vLLM or SGLang rollouts, on Ray, with or without a GPU."""

__version__ = "0.1.0"
