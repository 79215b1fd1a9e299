"""Reward `math`: finds the answer in a response and holds it against the reference."""

from roll_lite.rewards.math.reward import MathReward

__all__ = ["MathReward"]
