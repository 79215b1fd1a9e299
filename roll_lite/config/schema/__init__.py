"""Schema of the configuration; `make docs` writes docs/configuration.md from it."""
