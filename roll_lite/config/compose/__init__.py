"""From files and overrides to one tree of plain data."""
