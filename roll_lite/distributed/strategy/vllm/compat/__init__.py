r"""Everything that depends on vLLM's version.

vLLM reads environment variables when it is imported: the hosting process imports it inside functions, after setting them. vLLM loads
`worker.py` and `adapters.py` in its own processes; `judge_server.py` is a program."""
