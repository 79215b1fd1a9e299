"""Pure functions of tensors: advantages, losses, rewards, metrics. Masked entries contribute nothing."""
