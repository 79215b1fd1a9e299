"""Schema of the configuration: typed, strict, frozen. `make docs` writes the tables of `docs/configuration.md` from it. `checks/` compares
fields with each other, `arithmetic.py` derives values."""
