"""Merging of files and overrides into one tree of plain data."""
