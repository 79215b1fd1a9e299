"""Merging of files and overrides."""
