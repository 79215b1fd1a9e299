"""Architectures that roll_lite trains, as SGLang's "external" models: SGLang then skips importing two hundred others."""
