"""Checks of a configuration across its sections, one file per subject."""
