"""Worker processes that run a function as the ranks of a process group, again and again: importing Megatron takes seconds.

On CPUs over gloo, whatever the machine has, unless TEST_DEVICE is `cuda`: then rank i is on GPU i, and what wants more GPUs is skipped.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

TIMEOUT_S = 120
DEVICE = os.environ.get("TEST_DEVICE", "cpu")


class RankPool:
    def __init__(self) -> None:
        self._workers: list[tuple[mp.Process, Connection]] = []

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank of a fresh group, and what each returned.

        The first failure fails the test; hung ranks are ended.
        """
        if DEVICE == "cuda" and world_size > torch.cuda.device_count():
            pytest.skip(f"this wants {world_size} GPUs, and there are {torch.cuda.device_count()}")
        while len(self._workers) < world_size:
            self._workers.append(_start())
        ranks = self._workers[:world_size]
        with tempfile.TemporaryDirectory(prefix="rl_ranks_") as folder:
            for rank, (_, pipe) in enumerate(ranks):
                pipe.send((f"{folder}/store", rank, world_size, function, args))
            results: dict[int, Any] = {}
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
            while pipes:
                ready = wait(list(pipes), timeout=TIMEOUT_S)
                failure = None if ready else f"no answer from ranks {sorted(pipes.values())} within {TIMEOUT_S} s"
                for pipe in ready:
                    rank = pipes.pop(pipe)  # type: ignore[call-overload]
                    try:
                        ok, results[rank] = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        ok, results[rank] = False, "the process died"
                    failure = failure or (None if ok else f"rank {rank} of {world_size}:\n{results[rank]}")
                if failure:
                    self.close()
                    raise AssertionError(failure)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()


def _start() -> tuple[mp.Process, Connection]:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(pipe: Connection) -> None:
    import gc
    import warnings

    if DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from roll_lite.distributed.strategy.megatron import parallel  # noqa: F401  (prepares megatron.core)
    from megatron.core import parallel_state  # isort: skip
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    gc.freeze()  # what has been imported stays: no need to look through it after each function
    while True:
        try:
            store, rank, world_size, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        torch.manual_seed(0)
        try:
            if DEVICE == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            result = (True, function(*args))
            dist.barrier()
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send(result)
        if not result[0]:
            return
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # Models hold process groups, and those threads that poll. The keys of this cache hold models; so does what a dispatcher keeps of
        # its last tokens, through an autograd graph in which nobody finds cycles.
        RotaryEmbedding.forward.cache_clear()
        for dispatcher in [kept for kept in gc.get_objects() if type(kept) is MoEAlltoAllTokenDispatcher]:
            vars(dispatcher).clear()
        gc.collect()
