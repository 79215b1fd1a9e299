"""Rollouts on vLLM. Importing this package does not import vLLM, which reads its environment at import."""
