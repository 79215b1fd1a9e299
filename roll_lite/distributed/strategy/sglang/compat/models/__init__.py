"""Architectures that roll_lite trains, as SGLang's "external" models, so that SGLang does not import its own two hundred."""
