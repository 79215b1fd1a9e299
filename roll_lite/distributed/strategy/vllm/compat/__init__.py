r"""Everything that depends on vLLM's version.

vLLM reads its environment when it is imported: functions of the hosting process import it only after setting the environment. vLLM
imports `worker.py` in its own processes; `judge_server.py` is a program.
"""
