"""Code that depends on vLLM's version. `worker.py` and `adapters.py` run in vLLM's processes; elsewhere vLLM is imported only inside
functions, after environment variables are set."""
