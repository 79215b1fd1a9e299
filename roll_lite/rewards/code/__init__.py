"""Reward `code`: tests a response's program in a sandbox."""
