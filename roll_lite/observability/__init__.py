"""What a run tells: metrics and timers (used everywhere), trackers, console and report (used by the pipeline)."""
