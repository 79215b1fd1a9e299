"""Reward `math`: compares mathematical answers."""

from roll_lite.rewards.math.reward import MathReward

__all__ = ["MathReward"]
