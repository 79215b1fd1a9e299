"""Schema of the configuration: typed, strict, frozen. `make docs` writes docs/configuration.md from it."""
