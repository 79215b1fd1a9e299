r"""Everything that depends on SGLang's version.

`engine.py` is the hosting process's half; it talks to `server.py`, which runs SGLang in a separate process and imports it there.
SGLang's scheduler processes import `scheduler.py`; `cpu_stubs.py` and `models/` serve engines on a CPU.
"""
