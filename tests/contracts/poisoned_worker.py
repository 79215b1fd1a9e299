"""A worker of vLLM that loses its weights, as a GPU's memory does when nothing was copied."""

from __future__ import annotations

from roll_lite.distributed.strategy.inference.answers import answering
from roll_lite.distributed.strategy.vllm.compat.worker import WorkerExtension


class PoisonedWorker(WorkerExtension):
    @answering
    def poison(self) -> int:
        """Overwrite all parameters, and nothing else: vLLM restores buffers itself. Returns their number."""
        parameters = list(self.get_model().parameters())
        for parameter in parameters:
            parameter.data.fill_(float("nan"))
        return len(parameters)
