"""What vLLM's workers raise, on its way to the hosting process."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.distributed.strategy.inference.answers import answering, values
from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError


def step(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "done"


GONE, LATE, FULL = StaleEpoch("an engine has left"), TransferError("the trainer did not come"), ValueError("no memory")


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        ([GONE, GONE], StaleEpoch, "^an engine has left; an engine has left$"),
        ([GONE, LATE], TransferError, "^the trainer did not come$"),
        ([LATE, None], TransferError, "^the trainer did not come$"),
        ([LATE, FULL], RuntimeError, "^ValueError: no memory\n\n(?s:.)*in step\n"),
    ],
    ids=["all stopped", "one stopped", "one broke off", "one failed"],
)
def test_the_error_that_may_be_the_cause_of_the_others_is_raised(raised: list[Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        values([answering(step)(error) for error in raised])
    assert caught.type is kind


def test_values_come_back_in_the_workers_order() -> None:
    assert values([answering(len)("a"), answering(len)("bc")]) == [1, 2]


class Queue(deque[Any]):
    def enqueue(self, message: Any) -> None:
        self.append(message)

    def dequeue(self, timeout: float | None = None) -> Any:
        return self.popleft()


@pytest.mark.slow
async def test_an_update_that_breaks_off_on_all_workers_leaves_no_answer_to_the_next_call() -> None:
    """vLLM's own executor of several workers, and its own loop around each; only the processes and queues between them are not."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    from roll_lite.distributed.strategy.vllm.compat.engine import VllmEngine
    from roll_lite.distributed.strategy.vllm.compat.worker import WorkerExtension

    assert all(hasattr(method, "__wrapped__") for method in vars(WorkerExtension).values() if callable(method)), "none may raise"

    class Worker(WorkerExtension):
        def get_model(self) -> Any:
            return SimpleNamespace(load_weights=None)

    def load(*_: Any) -> None:
        raise GONE

    executor: Any = object.__new__(MultiprocExecutor)
    processes: list[Any] = []
    for rank, touched in enumerate((False, True)):
        process: Any = object.__new__(WorkerProc)
        process.rank, process.use_async_scheduling, process.worker_response_mq, process.worker = rank, False, Queue(), Worker()
        process.worker.vllm_config = None
        process.worker.roll_lite_receiver = SimpleNamespace(load=load, touched=touched)
        processes.append(process)

    def broadcast(call: Any) -> None:
        for process in processes:
            process._execute_worker_rpc(call)

    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=broadcast)
    executor.response_mqs = [process.worker_response_mq for process in processes]
    executor.is_failed, executor.futures_queue = False, deque()

    async def collective_rpc(method: str, **arguments: Any) -> Any:
        return executor.collective_rpc(method, **arguments)

    class Engine(VllmEngine):
        def __init__(self) -> None: ...

        _llm = SimpleNamespace(collective_rpc=collective_rpc)  # type: ignore[assignment]

    with pytest.raises(TransferError, match="an engine has left"):
        await Engine().call_workers("roll_lite_load_bucket", routes=[], following=[])
    assert await Engine().call_workers("roll_lite_weights_touched") == [False, True]
