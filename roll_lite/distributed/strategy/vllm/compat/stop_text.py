"""Stop strings that begin before a resume point: vLLM searches only what it has generated itself."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from roll_lite.distributed.strategy.inference.seam import SEAM

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor


def look_across_seams(processor: OutputProcessor) -> None:
    """Start requests that carry a SEAM with the text of that many last prompt tokens. Nothing else reads that text."""
    add = processor.add_request

    def add_request(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        params = request.sampling_params
        seam = (params.extra_args or {}).get(SEAM, 0) if params is not None else 0
        if seam:
            processor.request_states[request.request_id].detokenizer = detokenizer_across(processor.tokenizer, request, seam)

    processor.add_request = add_request


def detokenizer_across(tokenizer: Any, request: EngineCoreRequest, seam: int) -> IncrementalDetokenizer:
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer, SlowIncrementalDetokenizer

    assert request.prompt_token_ids is not None
    shorter = copy.copy(request)
    shorter.prompt_token_ids = request.prompt_token_ids[:-seam]
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, shorter)
    assert isinstance(detokenizer, BaseIncrementalDetokenizer)
    for token in request.prompt_token_ids[-seam:]:
        detokenizer.token_ids.append(token)
        detokenizer.output_text += detokenizer.decode_next(token)
    # They are not among the generated tokens.
    if isinstance(detokenizer, SlowIncrementalDetokenizer):
        detokenizer.prompt_len += seam
    else:
        detokenizer.token_ids.clear()
    return detokenizer
