"""Checks across sections."""
