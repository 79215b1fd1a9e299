from roll_lite.rewards.math.reward import MathReward

__all__ = ["MathReward"]
