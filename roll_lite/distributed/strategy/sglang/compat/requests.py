from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_lite.config.keep_mask import is_truncated
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, VersionSpan, since_token
from roll_lite.distributed.strategy.inference.requests import STOP_OVERLAP, chosen_experts, stop_overlap_tokens
from roll_lite.models.hf_config import ExpertsConfig

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

_CONTEXT = 8
"""Prompt tokens detokenized with the response's start: a token's text may depend on earlier ones."""
_INCOMPLETE = "\ufffd"


def generate_input(request: GenerationRequest, rid: str, max_model_len: int, vocabulary: int, experts: bool = False) -> GenerateReqInput:
    """Build SGLang's request. `rid` must not be a prefix of another id: SGLang aborts by prefix. `experts`: ask for expert choices."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = request.sampling
    room = max_model_len - len(request.prompt_ids)
    return GenerateReqInput(
        rid=rid,
        input_ids=list(request.prompt_ids),
        sampling_params={
            **_choice(request, vocabulary),
            "sampling_seed": None if sampling.seed is None else sampling.seed % 2**63,
            "max_new_tokens": min(sampling.max_tokens, room),
            "min_new_tokens": min(sampling.min_tokens, room),
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "no_stop_trim": True,
            "custom_params": {STOP_OVERLAP: overlap} if (overlap := stop_overlap_tokens(request)) else None,
        },
        return_logprob=True,
        return_sampling_mask=reports_survivors(request),
        return_routed_experts=experts,
        stream=False,
    )


def _choice(request: GenerationRequest, vocabulary: int) -> dict[str, Any]:
    """Convert sampling parameters.

    SGLang takes top_k 1 as greedy decoding, and then reports log-probs without truncation: min_p 1 is requested instead (log-prob 0).
    To report the tokens kept by truncation, SGLang needs a top_k: by default the vocabulary size.
    """
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
    return request.sampling.keep_mask and request.sampling.temperature > 0 and is_truncated(request.sampling)


def new_tokens(request: GenerationRequest, state: Any, first: int, versions: Sequence[VersionSpan]) -> Completion | None:
    """Return the tokens reported so far, from index `first`, without the newest."""
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
    tokens = tuple(state.output_ids[first:end])
    return Completion(request.request_id, tokens, log_probs, versions=since_token(versions, first, end), kept_ids=kept)


def completion(
    request: GenerationRequest, output: Mapping[str, Any], tokenizer: Any, aborted: bool, experts: ExpertsConfig | None = None
) -> Completion:
    """Convert SGLang's final output. `aborted`: an abort was requested. `experts`: None omits expert choices."""
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
    chosen = None
    if experts is not None and (told := meta.get("routed_experts")) is not None:
        flat = np.frombuffer(base64.b64decode(told), dtype=np.int32)
        chosen = chosen_experts(flat.reshape(-1, len(experts.layers), experts.per_token), experts)
    return Completion(
        request_id=request.request_id,
        token_ids=tokens,
        log_probs=log_probs,
        text=tokenizer.decode((*request.resumed_ids, *tokens), skip_special_tokens=True),
        finish_reason=FinishReason(finish["type"]),
        versions=tuple(VersionSpan(span["start"], int(span["version"])) for span in meta.get("weight_versions") or ()) if tokens else (),
        kept_ids=kept,
        # A recomputed request also counts its own response tokens as cached.
        cached_tokens=min(int(meta.get("cached_tokens") or 0), len(request.prompt_ids)),
        experts=chosen,
    )


class StopText:
    """Incremental detokenizer that finds stop strings. A character of several tokens appears at the last; special tokens have no text."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stops: Sequence[str], overlap: int = 0) -> None:
        """`overlap`: tokens at the prompt's end that belong to a resumed response."""
        begin = len(prompt_ids) - overlap
        self._tokenizer = tokenizer
        self._stops = stops
        self._pending = list(prompt_ids[max(0, begin - _CONTEXT) : begin])
        self._shown = len(self._pending)
        self._before = self._decoded().rstrip(_INCOMPLETE)
        self._text = ""
        self._longest = max(map(len, stops))
        self.tokens = -overlap
        """Tokens read since the request started; negative while the constructor reads those from before a resume."""
        for token in prompt_ids[begin:]:
            self.next(token)

    def next(self, token: int) -> str | None:
        self.tokens += 1
        self._pending.append(token)
        decoded = self._decoded()
        if len(decoded) <= len(self._before) or decoded.endswith(_INCOMPLETE):
            return None
        new = decoded[len(self._before) :]
        self._pending = self._pending[self._shown :]
        self._shown = len(self._pending)
        self._before = self._decoded()
        self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
        old, self._text = len(self._text), self._text + new
        return next((stop for stop in self._stops if self._text.find(stop, max(0, old - len(stop) + 1)) >= 0), None)

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._pending, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
