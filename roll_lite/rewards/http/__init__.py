"""Rewards that ask a service: a judge, or a reward model behind HTTP."""
