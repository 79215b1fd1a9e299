"""All that roll_lite knows of vLLM, whatever may change with its version.

vLLM reads its environment when it is imported: functions of the hosting process import it themselves, after the environment is set.
`worker.py` is imported by vLLM, in its own processes; `judge_server.py` is a program.
"""
