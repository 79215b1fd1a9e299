"""All code that depends on vLLM's version. vLLM reads environment variables when it is imported, so the hosting process sets them first,
and imports vLLM only inside functions. `worker.py` and `adapters.py` run in vLLM's own processes; `judge_server.py` is a program."""
