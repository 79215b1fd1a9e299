"""The configuration: typed, strict, frozen. Everything a user can write in YAML is declared here, once.

A field's description is its documentation: `docs/configuration.md` is generated from these files. What relates several fields to each
other is checked in `checks/`; what follows from them is computed in `arithmetic.py`.
"""
