"""Rewards that read the response's text."""
