from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, VersionSpan, since_token
from roll_lite.distributed.strategy.inference.adapters import NAME
from roll_lite.distributed.strategy.inference.requests import STOP_OVERLAP, InFlight, chosen_experts, stop_overlap_tokens
from roll_lite.models.hf_config import ExpertsConfig

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState


ADAPTERS = 1
STOP_IDS = 120
"""Maximum `stop_token_ids` with `min_tokens`: vLLM on GPUs dies with more than 128, end tokens included."""


def adapters_request() -> LoRARequest:
    """Build the request that selects the trained adapter. Placeholder path: vLLM reads it only if no adapter is loaded."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=NAME, lora_int_id=ADAPTERS, lora_path=NAME)


def sampling_params(request: GenerationRequest, alternatives: int = 0) -> SamplingParams:
    """Convert sampling parameters. `alternatives`: likeliest tokens whose log-probs are returned."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    if sampling.min_tokens and len(sampling.stop_token_ids) > STOP_IDS:
        raise ValueError(f"{len(sampling.stop_token_ids)} stop_token_ids beside min_tokens: vLLM has room for {STOP_IDS}")
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=True,  # text keeps the stop string, as token ids do
        logprobs=alternatives,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # text is needed during generation only for stop strings
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args={STOP_OVERLAP: overlap} if (overlap := stop_overlap_tokens(request)) else None,
    )


def prompt_input(token_ids: tuple[int, ...]) -> Any:
    """Return the prompt as vLLM's tokens_input. Other forms are processed in a thread, which could change the order of requests."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids))


def completion(
    request: GenerationRequest,
    output: RequestOutput,
    tokenizer: Any,
    version: int,
    alternatives: int | None = None,
    experts: ExpertsConfig | None = None,
) -> Completion:
    """Convert vLLM's final output. `version`: weight version if `output` lacks one. `alternatives`: log-probs per token, for kept_ids.
    `experts`: None omits expert choices."""
    response = output.outputs[0]
    if response.finish_reason not in {reason.value for reason in FinishReason}:
        return Completion(output.request_id, error=f"vLLM ended the request with {response.finish_reason!r}")
    tokens = tuple(response.token_ids)
    log_probs = tuple(response.logprobs.logprobs[start] for start in response.logprobs.start_indices) if tokens else ()
    assert len(log_probs) == len(tokens), f"{output.request_id}: {len(tokens)} tokens, {len(log_probs)} log-probs"
    spans = tuple(VersionSpan(span.start, int(span.version)) for span in response.weight_versions or ())
    drafts = response.spec_decode_metrics
    return Completion(
        request_id=output.request_id,
        token_ids=tokens,
        log_probs=log_probs,
        text=tokenizer.decode((*request.resumed_ids, *tokens), skip_special_tokens=True),
        finish_reason=FinishReason(response.finish_reason),
        versions=spans or ((VersionSpan(0, version),) if tokens else ()),
        kept_ids=None if alternatives is None else _kept_ids(response.logprobs, alternatives) if tokens else (),
        # A recomputed request also counts its own response tokens as cached.
        cached_tokens=min(output.num_cached_tokens or 0, len(output.prompt_token_ids or ())),
        drafted=drafts.num_draft_tokens if drafts is not None else 0,
        accepted=_accepted(drafts.histogram, len(tokens)) if drafts is not None else 0,
        experts=None if experts is None or response.routed_experts is None else chosen_experts(response.routed_experts, experts),
    )


def _accepted(steps: Sequence[int], length: int) -> int:
    """Return the accepted draft tokens, at most length - 1: the last step may accept tokens after the response's end. `steps[n]`: steps
    that accepted n tokens."""
    return min(sum(accepted * count for accepted, count in enumerate(steps)), max(0, length - 1))


def new_tokens(flight: InFlight, state: RequestState, alternatives: int | None) -> Completion | None:
    assert state.detokenizer is not None and state.logprobs_processor is not None
    first = flight.reported
    found = state.logprobs_processor.logprobs
    end = min(state.detokenizer.num_output_tokens(), len(found) if found is not None else 0) - 1
    if end <= first:
        return None
    new = found[first:end]
    spans = [VersionSpan(start, int(label)) for label, start in state.weight_version_starts] or [VersionSpan(0, flight.version)]
    return Completion(
        request_id=flight.request.request_id,
        token_ids=tuple(state.detokenizer.output_token_ids[first:end]),
        log_probs=tuple(new.logprobs[start] for start in new.start_indices),
        versions=since_token(spans, first, end),
        kept_ids=None if alternatives is None else _kept_ids(new, alternatives),
    )


def _kept_ids(found: FlatLogprobs, alternatives: int) -> tuple[tuple[int, ...], ...]:
    """Return the token ids that truncated sampling kept, by position; empty for greedy decoding. vLLM's `return_sampling_mask` needs a GPU
    and top_k."""
    if alternatives == 0:
        return ((),) * len(found)
    pairs = list(zip(found.token_ids, found.logprobs, strict=True))
    # The sampled token comes first, and again if it is among the likeliest.
    return tuple(
        tuple(dict.fromkeys(token for token, log_prob in pairs[start:end] if log_prob > -math.inf))
        for start, end in zip(found.start_indices, found.end_indices, strict=True)
    )


def restore_stop_overlap(processor: OutputProcessor) -> None:
    """Make vLLM find stop strings that begin in tokens generated before a resume: its detokenizer starts STOP_OVERLAP tokens before the
    prompt's end."""
    add = processor.add_request

    def add_request(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        params = request.sampling_params
        overlap = (params.extra_args or {}).get(STOP_OVERLAP, 0) if params is not None else 0
        if overlap:
            processor.request_states[request.request_id].detokenizer = detokenizer_with_overlap(processor.tokenizer, request, overlap)

    processor.add_request = add_request


def detokenizer_with_overlap(tokenizer: Any, request: EngineCoreRequest, overlap: int) -> IncrementalDetokenizer:
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer, SlowIncrementalDetokenizer

    assert request.prompt_token_ids is not None
    shorter = copy.copy(request)
    shorter.prompt_token_ids = request.prompt_token_ids[:-overlap]
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, shorter)
    assert isinstance(detokenizer, BaseIncrementalDetokenizer)
    for token in request.prompt_token_ids[-overlap:]:
        detokenizer.token_ids.append(token)
        detokenizer.output_text += detokenizer.decode_next(token)
    # These tokens must not count as generated.
    if isinstance(detokenizer, SlowIncrementalDetokenizer):
        detokenizer.prompt_len += overlap
    else:
        detokenizer.token_ids.clear()
    return detokenizer
