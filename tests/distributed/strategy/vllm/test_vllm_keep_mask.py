"""What vLLM's outputs say about truncation, without an engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from roll_lite.data.samples import GenerationRequest, Sampling
from roll_lite.distributed.strategy.vllm.compat import requests


def test_all_tokens_that_tie_with_the_last_are_kept() -> None:
    """top_k 2 where three tokens are equally likely: the engine samples from all three, and reports k + TIE_ROOM."""
    positions = [
        [(7, math.log(0.2)), (4, math.log(0.4)), (7, math.log(0.2)), (8, math.log(0.2)), (9, math.log(0.2)), (3, -math.inf)],
        [(8, math.log(0.5)), (8, math.log(0.5)), (4, math.log(0.5)), (3, -math.inf), (2, -math.inf), (1, -math.inf)],
    ]
    flat = SimpleNamespace(
        start_indices=[0, 6],
        end_indices=[6, 12],
        token_ids=[token for position in positions for token, _ in position],
        logprobs=[log_prob for position in positions for _, log_prob in position],
    )
    response = SimpleNamespace(token_ids=[7, 8], logprobs=flat, finish_reason="length", weight_versions=None, spec_decode_metrics=None)
    output: Any = SimpleNamespace(request_id="r", outputs=[response], num_cached_tokens=0, prompt_token_ids=[1])
    asked = GenerationRequest("r", (1,), Sampling(temperature=1.0, max_tokens=2))
    found = requests.completion(asked, output, SimpleNamespace(decode=lambda *_, **__: ""), 0, alternatives=5)
    assert found.kept_ids == ((7, 4, 8, 9), (8, 4))
    assert found.log_probs == (math.log(0.2), math.log(0.5))
