r"""Everything that depends on vLLM's version.

vLLM reads environment variables when it is imported, so code of the hosting process imports it inside functions, after setting them.
`worker.py` and `adapters.py` are loaded by vLLM in its own processes; `judge_server.py` is a program."""
