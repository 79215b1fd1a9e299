"""All that roll_lite knows of SGLang, whatever may change with its version.

`engine.py` is the hosting process's half and speaks to `server.py`, which runs SGLang in a process of its own. SGLang is imported by
functions that run there; `scheduler.py` is imported by SGLang's scheduler processes only; `cpu_stubs.py` and `models/` serve engines on a
CPU.
"""
