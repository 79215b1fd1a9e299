"""Checks across sections, one file per subject."""
