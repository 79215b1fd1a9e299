"""The architectures that roll_lite trains, as SGLang's "external" models: with them it does not import the two hundred others at start."""
