"""An engine, the Hugging Face model that it must agree with, and a process that sends it new weights."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # also in the sender's process
from support_models import EOS_ID, Family, load_hf, make_model, make_tiny_model

from roll_lite.config.schema import ModelConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest, Sampling
from roll_lite.distributed.strategy.base import ExportedTensor, ExportPlan
from roll_lite.distributed.strategy.inference.engine import EngineStrategy
from roll_lite.distributed.strategy.sglang import SglangStrategy
from roll_lite.distributed.strategy.vllm import VllmStrategy
from roll_lite.distributed.weight_sync.gloo import GlooSender, open_store
from roll_lite.distributed.weight_sync.plan import TransferPlan, plan_transfers

Make = Literal["vllm", "sglang"]
SHARPNESS = 2.0
PROMPT = (20, 7, 33, 41)


def random_state(family: Family, tied: bool, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What a trainer would export."""
    state = make_model(family, tied, seed=seed, sharpness=SHARPNESS).to(dtype).state_dict()
    if tied:
        del state["lm_head.weight"]
    return state


def export_plan(state: dict[str, torch.Tensor], buckets: int = 3) -> ExportPlan:
    """In alphabetical order, so that fused projections are torn apart between buckets."""
    names = sorted(state)
    return ExportPlan(
        tuple(ExportedTensor(n, tuple(state[n].shape), state[n].dtype, 0, i * buckets // len(names)) for i, n in enumerate(names))
    )


def _serve(connection: Connection) -> None:
    """The sender's process: joins groups and sends random models on demand."""
    torch.set_num_threads(1)
    sender: GlooSender | None = None
    states: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    while True:
        command, *arguments = connection.recv()
        try:
            if command == "join":
                sender = GlooSender(*arguments)
            elif command == "send":
                bucket, model = arguments
                states.setdefault(model, random_state(*model))
                assert sender is not None
                sender.send(bucket, states[model])
            connection.send(None)
        except RuntimeError as error:
            connection.send(f"{type(error).__name__}: {error}")


class SenderProcess:
    """Stands in for the training process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()

    async def call(self, *message: Any) -> None:
        self._connection.send(message)
        error = await asyncio.to_thread(self._connection.recv)
        if error is not None:
            raise RuntimeError(error)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def make_strategy(make: Make, model: ModelConfig, max_model_len: int, **options: Any) -> EngineStrategy:
    if make == "vllm":
        return VllmStrategy(model, VllmStrategyConfig(**options), max_model_len=max_model_len)
    return SglangStrategy(model, SglangStrategyConfig(**options), max_model_len=max_model_len)


@dataclass
class Harness:
    strategy: EngineStrategy
    family: Family
    tied: bool
    reference: Any
    dtype: torch.dtype = torch.float32
    version: int = 0
    sender: SenderProcess | None = None
    plan: TransferPlan | None = None
    counter: int = 0
    stores: list[Any] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        folder: Path,
        family: Family = "qwen2",
        tied: bool = True,
        max_model_len: int = 512,
        dtype: Literal["float32", "bfloat16"] = "float32",
        make: Make = "vllm",
        **options: Any,
    ) -> Harness:
        torch_dtype = getattr(torch, dtype)
        make_tiny_model(folder, family, tied, sharpness=SHARPNESS, dtype=torch_dtype)
        strategy = make_strategy(make, ModelConfig(path=folder, dtype=dtype), max_model_len, **options)
        await strategy.initialize()
        return cls(strategy, family, tied, load_hf(folder, torch_dtype), torch_dtype)

    async def stop(self) -> None:
        await self.strategy.shutdown()
        if self.sender is not None:
            self.sender.stop()

    def request(self, max_tokens: int = 16, prompt: Sequence[int] = PROMPT, temperature: float = 0.0, **sampling: Any) -> GenerationRequest:
        self.counter += 1
        return GenerationRequest(f"request/{self.counter}", tuple(prompt), Sampling(temperature, max_tokens, **sampling))

    async def one(self, max_tokens: int = 16, prompt: Sequence[int] = PROMPT, temperature: float = 0.0, **sampling: Any) -> Completion:
        return (await self.all([self.request(max_tokens, prompt, temperature, **sampling)]))[0]

    async def all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """In the order in which they finish."""
        return [completion async for completion in self.strategy.generate(requests)]

    # ------------------------------------------------------------ weights

    async def connect(self, timeout_s: float = 30.0) -> None:
        if self.sender is None:
            self.sender = SenderProcess()
            await self.sender.call("ping")  # it takes seconds to start, which is not what time-outs are about
        export = export_plan(random_state(self.family, self.tied, 0, self.dtype))
        self.plan = plan_transfers(export, [self.strategy._options.tensor_parallel])
        store = open_store("127.0.0.1")
        self.stores.append(store)
        joining = self.sender.call("join", "127.0.0.1", store.port, 0, self.plan.world_size, 1, timeout_s, self.plan.members())
        await asyncio.gather(joining, self.strategy.connect_weights(self.plan.endpoint(0, "gloo", "127.0.0.1", store.port, timeout_s)))

    @property
    def tensors(self) -> list[ExportedTensor]:
        assert self.plan is not None
        return [tensor for transfer in self.plan.transfers for tensor in transfer.tensors]

    async def transfer(self, number: int, seed: int) -> None:
        assert self.plan is not None and self.sender is not None
        tensors = self.plan.transfers[number].tensors
        sending = self.sender.call("send", tensors, (self.family, self.tied, seed, self.dtype))
        await asyncio.gather(sending, self.strategy.receive_bucket(tensors))

    async def update(self, seed: int) -> None:
        """The engine and the reference both get the random weights of this seed."""
        if self.plan is None:
            await self.connect()
        assert self.plan is not None
        await self.strategy.begin_weight_update(self.tensors)
        for number in range(len(self.plan.transfers)):
            await self.transfer(number, seed)
        self.version += 1
        await self.strategy.finish_weight_update(self.version)
        self.reference = make_model(self.family, self.tied, seed=seed, sharpness=SHARPNESS).to(self.dtype).eval()

    # ------------------------------------------------------------ the oracle

    def hf_greedy(self, max_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
        output = self.reference.generate(torch.tensor([list(prompt)]), max_new_tokens=max_tokens, do_sample=False)
        return output[0, len(prompt) :].tolist()

    def hf_logits(self, tokens: Sequence[int], prompt: Sequence[int] = PROMPT) -> torch.Tensor:
        """[tokens, vocabulary]: row i is what token i was chosen from."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits[len(prompt) - 1 : -1].float()


def log_probs_of(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_log_probs(completion: Completion, logits: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert completion.error is None and completion.token_ids
    torch.testing.assert_close(torch.tensor(completion.log_probs), log_probs_of(logits, completion.token_ids), atol=tolerance, rtol=0)


def assert_greedy(tokens: Sequence[int], logits: torch.Tensor) -> None:
    """Each token is the likeliest but for rounding; EOS was forbidden."""
    logits = logits.clone()
    logits[:, EOS_ID] = float("-inf")
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert gap.max() < 1e-3, f"at token {int(gap.argmax())} of {len(tokens)}"
