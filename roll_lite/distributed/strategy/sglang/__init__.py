"""Rollouts on SGLang. Importing this package does not import SGLang, which lives in separate processes."""
