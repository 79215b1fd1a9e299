"""Architectures that roll_lite trains, as SGLang's "external" models: it then skips importing two hundred others."""
