"""What roll_lite knows about SGLang's version: supported range, environment, engine arguments, requests, outputs.

`scheduler.py`, which runs inside SGLang's scheduler processes, knows the rest. SGLang itself is imported by the functions that need it,
in the engine's own process.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_lite.config.check_layout import OWN_ARGUMENTS
from roll_lite.config.hf_config import read_hf_config
from roll_lite.config.keep_mask import KEEP_LIMIT, is_truncated
from roll_lite.config.schema import ModelConfig, SglangStrategyConfig
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, VersionSpan

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

SUPPORTED = ((0, 5, 23), (0, 5, 24))
"""From, up to but not including: what the tests have run on."""

_CPU_KV_CACHE_MB = 256
_INPUT_MARGIN = 8
"""Places of the context that SGLang does not let a prompt fill."""


def check_version() -> str:
    """Version of the installed SGLang."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise RuntimeError("strategy `sglang` needs SGLang: pip install 'roll_lite[sglang]'") from None
    digits = version.split("+")[0].split(".post")[0].split("rc")[0].split(".")
    if not digits or not all(part.isdigit() for part in digits) or not SUPPORTED[0] <= tuple(map(int, digits)) < SUPPORTED[1]:
        raise RuntimeError(f"sglang {version} is installed, roll_lite supports sglang >={low},<{high}")
    return version


def engine_environment(threads: int, devices: Sequence[int] | None, cuda: bool, workers: int = 1) -> dict[str, str]:
    """Variables that the engine's process finds when it starts. `devices`: the GPUs that it may use; all visible ones where None."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The context is a few places longer than the model's, since prompts may not fill SGLang's; no response gets that far.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::DeprecationWarning,ignore::FutureWarning",
    }
    if cuda:
        return environment if devices is None else environment | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return environment | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "roll_lite.distributed.strategy.sglang.models",
        "OMP_NUM_THREADS": str(threads),
        # Left to itself, SGLang wants a NUMA node for each worker. Its native path binds nothing, whatever stands here.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * workers),
        # Some sampling paths are compiled at their first call, which takes half a minute.
        "TORCHDYNAMO_DISABLE": "1",
    }


def engine_arguments(model: ModelConfig, strategy: SglangStrategyConfig, max_model_len: int, seed: int, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine."""
    taken = sorted(set(OWN_ARGUMENTS["sglang"]) & set(strategy.engine_args))
    if taken:
        raise ValueError(f"actor_infer.strategy.engine_args.{taken[0]}: roll_lite sets this one itself; remove it")
    arguments: dict[str, Any] = {
        "model_path": str(model.path),
        "dtype": model.dtype,
        "device": "cuda" if cuda else "cpu",
        "random_seed": seed,
        "tp_size": strategy.tensor_parallel,
        "context_length": max_model_len + _INPUT_MARGIN,
        "max_running_requests": strategy.max_running_requests,
        "max_prefill_tokens": max(strategy.max_batched_tokens, max_model_len),
        "chunked_prefill_size": strategy.max_batched_tokens,
        "sampling_backend": "pytorch",
        "sampling_mask_max_tokens": KEEP_LIMIT,
        "weight_version": "0",
        "grammar_backend": "none",
        "log_level": "error",
        "enable_memory_saver": cuda,
        "disable_cuda_graph": strategy.enforce_eager or not cuda,
    }
    if cuda:
        arguments["mem_fraction_static"] = strategy.gpu_memory_utilization
    else:
        arguments |= {"attention_backend": "torch_native", "disable_overlap_schedule": True, "sleep_on_idle": True}
    if strategy.kv_cache_mb is not None or not cuda:
        arguments["max_total_tokens"] = _cache_tokens(model, strategy)
    return arguments | strategy.engine_args


def _cache_tokens(model: ModelConfig, strategy: SglangStrategyConfig) -> int:
    shape = read_hf_config(model.path)
    heads = -(-shape.key_value_heads // strategy.tensor_parallel)
    nbytes = 2 * shape.layers * heads * shape.head_dim * (4 if model.dtype == "float32" else 2)
    return ((strategy.kv_cache_mb or _CPU_KV_CACHE_MB) << 20) // nbytes


def check_engine_args(strategy: SglangStrategyConfig, known: Sequence[str]) -> None:
    unknown = sorted(set(strategy.engine_args) - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"actor_infer.strategy.engine_args.{unknown[0]}: SGLang has no such engine argument{hint}")


def generate_input(request: GenerationRequest, rid: str, seed: int, max_model_len: int, vocabulary: int) -> GenerateReqInput:
    """`seed`: for requests without one of their own. `rid` must be no prefix of another: SGLang aborts by prefix."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = request.sampling
    return GenerateReqInput(
        rid=rid,
        input_ids=list(request.prompt_ids),
        sampling_params={
            **_choice(request, vocabulary),
            "sampling_seed": (seed if sampling.seed is None else sampling.seed) % 2**63,
            "max_new_tokens": min(sampling.max_tokens, max_model_len - len(request.prompt_ids)),
            "min_new_tokens": sampling.min_tokens,
            "stop": list(sampling.stop) or None,
            "no_stop_trim": True,
        },
        return_logprob=True,
        return_sampling_mask=reports_survivors(request),
        stream=False,
    )


def _choice(request: GenerationRequest, vocabulary: int) -> dict[str, Any]:
    """Greedy decoding is top_k 1, and only that: a top_k of 1 under a temperature goes as a min_p of 1, which keeps the likeliest token
    as well but has log-prob 0, not that of the whole distribution (see the sampler). Who asks for survivors has to give a top_k."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return {"temperature": 1.0, "top_k": 1}
    only_one = sampling.top_k == 1
    everything = vocabulary if reports_survivors(request) else -1
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": everything if only_one or not 0 < sampling.top_k < vocabulary else sampling.top_k,
        "min_p": 1.0 if only_one else sampling.min_p,
    }


def reports_survivors(request: GenerationRequest) -> bool:
    """Whether to ask which tokens survived; greedy decoding knows no truncation."""
    return request.sampling.keep_mask and request.sampling.temperature > 0 and is_truncated(request.sampling)


def completion(request: GenerationRequest, output: Mapping[str, Any], tokenizer: Any, aborted: bool) -> Completion:
    """The final output of a request. `aborted`: somebody asked for that."""
    meta = output["meta_info"]
    finish = meta["finish_reason"] or {"type": "none"}
    if finish["type"] not in {reason.value for reason in FinishReason} or (finish["type"] == FinishReason.ABORT and not aborted):
        return Completion(request.request_id, error=f"SGLang ended the request with {finish['type']!r}: {finish.get('message', '')}")
    tokens = tuple(output["output_ids"])
    log_probs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
    assert len(log_probs) == len(tokens), f"{request.request_id}: {len(tokens)} tokens, {len(log_probs)} log-probs"
    kept: tuple[tuple[int, ...], ...] | None = None
    if request.sampling.keep_mask:
        kept = tuple(map(tuple, meta.get("output_token_sampling_mask") or ())) if reports_survivors(request) else ((),) * len(tokens)
        assert len(kept) == len(tokens), f"{request.request_id}: {len(tokens)} tokens, {len(kept)} masks"
    return Completion(
        request_id=request.request_id,
        token_ids=tokens,
        log_probs=log_probs,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        finish_reason=FinishReason(finish["type"]),
        versions=tuple(VersionSpan(span["start"], int(span["version"])) for span in meta.get("weight_versions") or ()) if tokens else (),
        kept_ids=kept,
    )


def read_answer(file: Path) -> Any:
    """What a method of RolloutScheduler left behind; None where it had nothing to say."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def known_arguments(server_args: Any) -> list[str]:
    return list(getattr(server_args, "__struct_fields__", ()) or getattr(server_args, "__dataclass_fields__", ()))
