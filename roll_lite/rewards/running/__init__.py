"""How samples are scored: many at a time, within time limits, in a process of their own."""
