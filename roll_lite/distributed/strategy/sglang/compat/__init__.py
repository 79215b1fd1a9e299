"""All that roll_lite knows of SGLang, whatever may change with its version. The strategy and the server above see only what stands here.

SGLang itself is imported by functions that run in the engine's own processes. `scheduler.py` is imported by SGLang's scheduler processes
only; `cpu_stubs.py` and `models/` serve engines on a CPU.
"""
