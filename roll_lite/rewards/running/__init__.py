"""Scoring of samples: many at a time, within time limits, in separate processes."""
