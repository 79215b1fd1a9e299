"""Architectures that roll_lite trains, as SGLang's "external" models: with them it skips importing two hundred others."""
