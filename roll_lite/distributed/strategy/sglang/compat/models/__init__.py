"""Architectures that roll_lite trains, as SGLang's "external" models, so that SGLang skips importing two hundred others."""
