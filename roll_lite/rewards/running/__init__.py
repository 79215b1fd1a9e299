"""Scores many samples concurrently, within time limits, in separate processes."""
