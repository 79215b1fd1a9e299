"""Rewards from an HTTP service: a judge or a reward model."""
