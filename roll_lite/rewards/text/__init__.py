"""Rewards that check the response's text."""
