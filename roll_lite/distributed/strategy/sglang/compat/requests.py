"""Requests and completions in SGLang's format."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_lite.config.keep_mask import is_truncated
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, VersionSpan
from roll_lite.distributed.strategy.inference.requests import SEAM, chosen_experts, seam_tokens
from roll_lite.models.hf_config import ExpertsConfig

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput


def generate_input(
    request: GenerationRequest, rid: str, seed: int, max_model_len: int, vocabulary: int, experts: bool = False
) -> GenerateReqInput:
    """`seed`: for requests without their own. `rid` must not be a prefix of another one, because SGLang aborts by prefix. `experts`: report
    expert choices."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = request.sampling
    room = max_model_len - len(request.prompt_ids)
    return GenerateReqInput(
        rid=rid,
        input_ids=list(request.prompt_ids),
        sampling_params={
            **_choice(request, vocabulary),
            "sampling_seed": (seed if sampling.seed is None else sampling.seed) % 2**63,
            "max_new_tokens": min(sampling.max_tokens, room),
            "min_new_tokens": min(sampling.min_tokens, room),
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "no_stop_trim": True,
            "custom_params": {SEAM: seam} if (seam := seam_tokens(request)) else None,
        },
        return_logprob=True,
        return_sampling_mask=reports_survivors(request),
        return_routed_experts=experts,
        stream=False,
    )


def _choice(request: GenerationRequest, vocabulary: int) -> dict[str, Any]:
    """Sampling parameters for SGLang, which decodes greedily exactly if top_k is 1. A request with top_k 1 and a temperature is sent as
    min_p 1: that also keeps only the likeliest token, but reports its log-prob as 0 (greedy: under the whole distribution, see
    RolloutSampler). SGLang reports kept tokens only with a top_k; without one, the vocabulary's size is sent."""
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
    """True if SGLang must report kept tokens; greedy decoding truncates nothing."""
    return request.sampling.keep_mask and request.sampling.temperature > 0 and is_truncated(request.sampling)


def new_tokens(request: GenerationRequest, state: Any, first: int, version: int) -> Completion | None:
    """Tokens that SGLang has reported (every 50) after the `first` ones, without the newest; None if there are none. `version`: their
    weight version."""
    end = min(len(state.output_ids), len(state.output_token_logprobs_val)) - 1
    kept: tuple[tuple[int, ...], ...] | None = None
    if request.sampling.keep_mask:
        if reports_survivors(request):
            end = min(end, len(state.output_token_sampling_mask) - 1)
            kept = tuple(map(tuple, state.output_token_sampling_mask[first:end]))
        else:
            kept = ((),) * max(0, end - first)
    if end <= first:
        return None
    log_probs = tuple(map(float, state.output_token_logprobs_val[first:end]))
    return Completion(request.request_id, tuple(state.output_ids[first:end]), log_probs, versions=(VersionSpan(0, version),), kept_ids=kept)


def completion(
    request: GenerationRequest, output: Mapping[str, Any], tokenizer: Any, aborted: bool, experts: ExpertsConfig | None = None
) -> Completion:
    """Make a completion of a request's final output. `aborted`: an abort was asked for. `experts`: to report expert choices."""
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
        text=tokenizer.decode((*request.resumed_ids, *tokens), skip_special_tokens=True),
        finish_reason=FinishReason(finish["type"]),
        versions=tuple(VersionSpan(span["start"], int(span["version"])) for span in meta.get("weight_versions") or ()) if tokens else (),
        kept_ids=kept,
        # A recomputed request finds its own tokens in the cache too.
        cached_tokens=min(int(meta.get("cached_tokens") or 0), len(request.prompt_ids)),
        experts=None if experts is None else _experts(meta, experts),
    )


def _experts(meta: Mapping[str, Any], experts: ExpertsConfig) -> np.ndarray | None:
    """Expert choices; None if the request ended before it began."""
    if (told := meta.get("routed_experts")) is None:
        return None
    flat = np.frombuffer(base64.b64decode(told), dtype=np.int32)
    return chosen_experts(flat.reshape(-1, len(experts.layers), experts.per_token), experts)
