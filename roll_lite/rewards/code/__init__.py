"""Reward `code`: programs run in sandboxes and pass tests."""
