"""The schema of the configuration: typed, strict, frozen. Every YAML setting is declared here, once.

A field's description is its documentation: `docs/configuration.md` is generated from these files. `checks/` checks fields against each
other, `arithmetic.py` computes derived values.
"""
