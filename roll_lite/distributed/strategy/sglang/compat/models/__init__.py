"""Architectures that roll_lite trains, as SGLang's "external" models, so that SGLang does not import two hundred others."""
