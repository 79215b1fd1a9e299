"""Schema of the configuration: typed, strict, frozen. `docs/configuration.md` is generated from it; `checks/` compares fields,
`arithmetic.py` derives values."""
