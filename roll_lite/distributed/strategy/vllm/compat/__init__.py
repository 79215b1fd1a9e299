"""Code that depends on vLLM's version.

`worker.py` and `adapters.py` run in vLLM's processes. Other modules import vLLM inside functions, once environment variables are set.
"""
