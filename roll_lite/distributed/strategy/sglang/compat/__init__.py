"""Code that depends on SGLang's version. `engine.py` (hosting process) talks to `server.py` (own process); SGLang's schedulers import
`scheduler.py`."""
