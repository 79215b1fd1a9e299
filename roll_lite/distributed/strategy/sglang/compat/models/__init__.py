"""Model architectures that roll_lite trains, as SGLang's "external" models. SGLang then does not import its two hundred others."""
