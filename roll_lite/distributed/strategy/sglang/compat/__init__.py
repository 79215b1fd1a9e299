"""All that roll_lite knows of SGLang, whatever may change with its version. The strategy and the server above see only what stands here.

SGLang itself is imported by functions that run in the engine's own processes. `scheduler.py` is imported by SGLang's scheduler processes
only; `cpu_stubs.py` and `models/` serve engines on a CPU.
"""

from roll_lite.distributed.strategy.sglang.compat.environment import engine_environment
from roll_lite.distributed.strategy.sglang.compat.files import keep_files_in, logged_error
from roll_lite.distributed.strategy.sglang.compat.manager import Manager
from roll_lite.distributed.strategy.sglang.compat.version import check_version

__all__ = ["Manager", "check_version", "engine_environment", "keep_files_in", "logged_error"]
