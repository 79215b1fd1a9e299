"""All code that depends on SGLang's version. `engine.py` runs in the hosting process. It talks to `server.py`, which runs SGLang in a
separate process. SGLang's scheduler processes import `scheduler.py`. `cpu_stubs.py` and `models/` serve engines on a CPU."""
