"""Versions, environment, engine arguments, requests and outputs, without an engine."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_models import make_tiny_model

from roll_lite.config.arithmetic import EngineOffload
from roll_lite.config.schema.models import ModelConfig, SglangStrategyConfig
from roll_lite.data.samples import FinishReason, GenerationRequest, Sampling, VersionSpan
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.strategy.sglang.compat.requests import completion
from roll_lite.distributed.strategy.sglang.compat.server import _tags
from roll_lite.distributed.strategy.sglang.compat.settings import (
    check_cache,
    check_version,
    engine_arguments,
    engine_environment,
)

TOKENIZER = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "text")


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def lookup(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", lookup)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    assert check_version() == version


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "1.0", "0.4.99", "0.5.24rc1"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    with pytest.raises(RuntimeError, match=r"roll_lite supports sglang >=0.5.23,<0.5.24"):
        check_version()


def test_missing_sglang_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"roll_lite\[sglang\]"):
        check_version()


def test_environments() -> None:
    cpu = engine_environment(threads=3, cuda=False, workers=2).variables({})
    assert cpu["OMP_NUM_THREADS"] == "3" and cpu["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    gpu = engine_environment(threads=3, cuda=True).variables({})
    assert not {"SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE"} & gpu.keys()


@pytest.mark.parametrize("cuda", [False, True])
def test_what_the_user_has_set_in_the_environment_stays(cuda: bool) -> None:
    given = {"HF_HUB_OFFLINE": "0", "PYTHONWARNINGS": "error", "SGLANG_CPU_OMP_THREADS_BIND": "0-3"}
    environment = engine_environment(1, cuda)
    assert given.items() <= (given | environment.variables(given)).items() and environment.notes(given) == []
    given["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "0"
    assert environment.variables(given)["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=0 is set to '1'" in note for note in environment.notes(given)] == [True]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=make_tiny_model(tmp_path_factory.mktemp("model") / "m"), dtype="float32")


def arguments(model: ModelConfig, cuda: bool, **options: Any) -> dict[str, Any]:
    return engine_arguments(model, SglangStrategyConfig(**options), 512, seed=1, cuda=cuda)


def test_what_only_gpus_get(model: ModelConfig) -> None:
    gpu, cpu = arguments(model, True), arguments(model, False)
    for name in ("enable_memory_saver", "enable_weights_cpu_backup"):
        assert gpu[name] and not cpu[name]
    assert not gpu["disable_cuda_graph"] and cpu["disable_cuda_graph"]
    assert "max_total_tokens" not in gpu and gpu["mem_fraction_static"] == 0.85
    assert cpu["attention_backend"] == "torch_native" and "attention_backend" not in gpu


@pytest.mark.parametrize(
    ("sleep", "copies", "frees_graphs"), [("never", False, False), ("with_copy", True, True), ("without_copy", False, True)]
)
def test_what_leaves_a_gpu_with_the_weights(model: ModelConfig, sleep: EngineOffload, copies: bool, frees_graphs: bool) -> None:
    """CUDA graphs of prefills cannot be freed: SGLang would raise at the start."""
    gpu = engine_arguments(model, SglangStrategyConfig(), 512, seed=1, cuda=True, sleep=sleep)
    assert gpu["enable_memory_saver"] and gpu["enable_weights_cpu_backup"] == copies
    assert gpu.get("cuda_graph_backend_prefill") == ("disabled" if frees_graphs else None)
    own = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "TMS_RETAIN_CPU_BACKUP": "1"}
    variables = engine_environment(1, cuda=True, sleep=sleep).variables({})
    assert (own.items() <= variables.items()) == frees_graphs and (not own.keys() & variables.keys()) == (not frees_graphs)
    assert engine_environment(1, cuda=True, sleep=sleep).variables(dict.fromkeys(own, "0")).get("TMS_RETAIN_CPU_BACKUP", "0") == "0"
    cpu = engine_arguments(model, SglangStrategyConfig(), 512, seed=1, cuda=False, sleep=sleep)
    assert "cuda_graph_backend_prefill" not in cpu and not own.keys() & engine_environment(1, cuda=False, sleep=sleep).variables({}).keys()


def test_sglang_has_these_names() -> None:
    """They are SGLang's own: one that it no longer reads would pass unnoticed."""
    sources = Path(next(iter(find_spec("sglang").submodule_search_locations))) / "srt"  # type: ignore[union-attr, arg-type]
    texts = {name: (sources / name).read_text(encoding="utf-8") for name in ("environ.py", "constants.py", "arg_groups/fields/exec_.py")}
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" in texts["environ.py"] and "cuda_graph_backend_prefill" in texts["arg_groups/fields/exec_.py"]
    for tag in _tags(list(EngineMemory)):
        assert f'= "{tag}"' in texts["constants.py"]
    assert sorted(_tags(list(EngineMemory))) == ["cuda_graph", "kv_cache", "weights"]


def test_weights_in_fp8_can_be_replaced_by_one_loader_only(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_lite.config.checks.gpu_only import SGLANG_FP8

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert {"quantization": "fp8", "load_format": "flash_rl"}.items() <= arguments(model, True, quantization="fp8").items()
    with pytest.raises(ValueError, match="fp8 needs a GPU, and there is none here; use none"):
        arguments(model, False, quantization="fp8")
    models = Path(next(iter(find_spec("sglang").submodule_search_locations))) / "srt/models"  # type: ignore[union-attr, arg-type]
    declared = {file.stem for file in models.glob("*.py") if "@supports_quantized_rl_reload" in file.read_text(encoding="utf-8")}
    assert declared >= set(SGLANG_FP8) and not declared & {"llama", "mistral", "qwen3_moe"}


def test_workers_share_experts_where_that_is_asked_for(model: ModelConfig) -> None:
    assert arguments(model, True, tensor_parallel=2, expert_parallel=2)["ep_size"] == 2
    assert arguments(model, True, tensor_parallel=2)["ep_size"] == 1


def test_the_cache_holds_as_many_tokens_as_fit(model: ModelConfig) -> None:
    """Two layers, one key/value head of 32 numbers, keys and values of 4 bytes: 512 bytes a token."""
    assert arguments(model, False, kv_cache_mb=1)["max_total_tokens"] == 2048
    assert arguments(model, True, kv_cache_mb=1)["max_total_tokens"] == 2048


@pytest.mark.parametrize(
    ("options", "cuda", "tokens", "page_size", "message"),
    [
        ({"kv_cache_mb": 1}, False, 2048, 1, r"kv_cache_mb: 1 is too little: .* holds 2048 tokens, .* 3000 needs 3002; use at least 2"),
        ({"kv_cache_mb": 1}, True, 2048, 64, r"kv_cache_mb: 1 is too little: .* needs 3128"),
        ({}, True, 3001, 1, r"gpu_memory_utilization: 0.85 is too little: .* holds 3001 tokens, .*, so that 2 MB are left"),
        ({"kv_cache_mb": 9}, True, 3001, 1, r"gpu_memory_utilization: 0.85 is too little"),
        ({"kv_cache_mb": 9}, True, 3002, 1, None),
        ({}, False, 1 << 19, 64, None),
    ],
    ids=["cpu", "pages", "gpu", "more than the gpu has", "fits exactly", "default"],
)
def test_one_request_fits_into_the_cache(
    model: ModelConfig, options: dict[str, Any], cuda: bool, tokens: int, page_size: int, message: str | None
) -> None:
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_cache(model, SglangStrategyConfig(**options), 3000, cuda, tokens, page_size)


def test_users_engine_arguments(model: ModelConfig) -> None:
    assert arguments(model, False, engine_args={"page_size": 16})["page_size"] == 16


def output(finish: dict[str, Any], tokens: list[int], **meta: Any) -> dict[str, Any]:
    log_probs = [(-0.5, token, None) for token in tokens]
    return {"output_ids": tokens, "meta_info": {"finish_reason": finish, "output_token_logprobs": log_probs, **meta}}


def request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest("r", (1, 2), Sampling(1.0, 4, **sampling))


def test_a_finished_request() -> None:
    spans = [{"start": 0, "end": 1, "version": "3"}, {"start": 1, "end": 2, "version": "4"}]
    found = completion(request(), output({"type": "stop", "matched": 2}, [7, 2], weight_versions=spans), TOKENIZER, False)
    assert (found.token_ids, found.log_probs, found.finish_reason) == ((7, 2), (-0.5, -0.5), FinishReason.STOP)
    assert found.versions == (VersionSpan(0, 3), VersionSpan(1, 4)) and found.kept_ids is None


def test_an_abort_that_nobody_asked_for_is_a_failure() -> None:
    aborted = output({"type": "abort", "message": "out of memory"}, [7])
    assert completion(request(), aborted, TOKENIZER, aborted=True).finish_reason == FinishReason.ABORT
    assert "out of memory" in (completion(request(), aborted, TOKENIZER, aborted=False).error or "")


def test_survivors_are_those_of_each_token() -> None:
    masks = [[7, 9], [2]]
    truncated = output({"type": "length"}, [7, 2], output_token_sampling_mask=masks)
    assert completion(request(top_k=2, keep_mask=True), truncated, TOKENIZER, False).kept_ids == ((7, 9), (2,))
    assert completion(request(keep_mask=True), output({"type": "length"}, [7]), TOKENIZER, False).kept_ids == ((),)
