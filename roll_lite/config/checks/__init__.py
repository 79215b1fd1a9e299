"""Checks that involve more than one section, one file per subject."""
