"""What runs inside vLLM's worker processes: how weights arrive and are loaded, what the model holds, when to die.

The hosting process's half is `llm.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll_lite.distributed.strategy.base import ExportedTensor, TransferEndpoint
from roll_lite.distributed.strategy.inference.held_weights import Layers, held_weights
from roll_lite.distributed.strategy.inference.processes import HOST_PID, is_running, kill_all, when_host_is_gone
from roll_lite.distributed.strategy.vllm.compat.settings import TRANSFER_BACKEND
from roll_lite.distributed.weight_sync.checksum import checksum
from roll_lite.distributed.weight_sync.receivers import RECEIVERS
from roll_lite.distributed.weight_sync.transport import WeightReceiver


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """The fields of a TransferEndpoint."""

    transport: str
    host: str
    port: int
    world_size: int
    first_rank: int
    senders: int
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket: (name, shape, dtype) of each tensor, and who sends it."""

    tensors: list[list[Any]]
    sender: int


class BucketTransfer(WeightTransferEngine[ConnectInfo, BucketInfo]):
    """Receives full Hugging Face tensors bucket by bucket and loads them into this worker's part of the model."""

    init_info_cls = ConnectInfo
    update_info_cls = BucketInfo

    _receiver: WeightReceiver | None = None
    touched = False
    """Loading has begun: until it is finished, the model is neither the old nor the new one."""

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        self.shutdown()
        self._receiver = RECEIVERS[init_info.transport](TransferEndpoint(**vars(init_info)), self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Nothing yet: the old weights stay until the first bucket has arrived."""

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self._receiver is None:
            raise RuntimeError("the engine has not joined a transfer group: connect_weights comes first")
        bucket = [
            ExportedTensor(name, tuple(shape), getattr(torch, dtype), owner=update_info.sender, bucket=0)
            for name, shape, dtype in update_info.tensors
        ]
        tensors = self._receiver.receive(bucket, update_info.sender)
        if not self.touched:
            self.touched = True
            initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_lm_head_again()
        self.touched = False

    def _pack_lm_head_again(self) -> None:
        """A tied LM head gets no weights of its own, so the reload leaves the CPU's packed copy of the old embedding in place."""
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _layers() -> Layers:
    return Layers.of(linear, vocab_parallel_embedding, get_tensor_model_parallel_world_size(), tensor_model_parallel_all_gather)


class WorkerExtension:
    """Methods that vLLM adds to its worker class; called by name through collective_rpc."""

    weight_transfer_engine: Any
    rank: int
    get_model: Any

    def roll_lite_weights_touched(self) -> bool:
        return bool(self.weight_transfer_engine.touched)

    def roll_lite_checksums(self, dtypes: dict[str, str]) -> dict[str, str]:
        """Of what the model holds, by Hugging Face name, in the dtypes given. Gathering is collective, the first worker answers."""
        sums = {}
        for name, tensor in held_weights(self.get_model(), _layers()):
            if self.rank == 0:
                sums[name] = checksum(tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor)
        return sums


def _die_without_host(parent: psutil.Process | None) -> None:
    """vLLM's engine process, which stands between this one and the host, does not notice when the host is killed."""
    engine = [parent] if parent is not None and parent.pid != int(os.environ[HOST_PID]) and is_running(parent) else []
    kill_all([*engine, psutil.Process()])


WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, BucketTransfer)
when_host_is_gone(partial(_die_without_host, psutil.Process().parent()))
