"""All code that depends on vLLM's version. The hosting process imports vLLM only inside functions, because environment variables must be
set first. `worker.py` and `adapters.py` run in vLLM's processes."""
