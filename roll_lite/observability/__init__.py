"""Metrics and timers (used everywhere), trackers, console and report (used by the pipeline)."""
