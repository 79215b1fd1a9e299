"""All that roll_lite knows of vLLM, whatever may change with its version. The strategy above sees only what stands here.

vLLM reads its environment when it is imported: functions of the hosting process import it themselves, after the environment is set.
`worker.py` is imported by vLLM, in its own processes; `judge_server.py` is a program.
"""

from roll_lite.distributed.strategy.vllm.compat.arguments import engine_arguments
from roll_lite.distributed.strategy.vllm.compat.environment import SOCKETS, apply_environment, engine_environment, on_cuda
from roll_lite.distributed.strategy.vllm.compat.llm import Llm
from roll_lite.distributed.strategy.vllm.compat.version import check_version

__all__ = ["SOCKETS", "Llm", "apply_environment", "check_version", "engine_arguments", "engine_environment", "on_cuda"]
