"""Token blocks: generated tokens as columns, written beside the engine.

A row is a whole sample so far: prompt, responses, and what an environment wrote in between. If one block holds the first turn of a sample,
another holds the first and the second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Completion, GenerationRequest, TokenRow

BLOCK_TOKENS = 2**16
"""Size of a full block, about 850 KB. A reader of one row fetches the whole block; sending a reference costs 100 to 200 microseconds."""

EXPERTS = "rollout_experts"
TOKEN_COLUMNS = ("input_ids", "response_mask", "rollout_log_probs")


@dataclass(frozen=True)
class TokenRecord:
    """The tokens of one sample; all arrays have length T."""

    ids: np.ndarray
    """int64"""
    mask: np.ndarray
    """bool: the policy chose the token."""
    log_probs: np.ndarray
    """float32, under the sampling distribution; 0 where the mask is 0."""
    kept_ids: np.ndarray | None = None
    """[T, K] int32: ids that survived truncation, padded with -1. None: sampling was not truncated."""
    experts: np.ndarray | None = None
    """[T, K] int16: experts that processed the token, -1 if unknown. None: all unknown."""

    def __len__(self) -> int:
        return len(self.ids)

    def drop_prefix(self, first: int) -> TokenRecord:
        """Drop the first tokens."""
        kept, experts = (None if part is None else part[first:] for part in (self.kept_ids, self.experts))
        return TokenRecord(self.ids[first:], self.mask[first:], self.log_probs[first:], kept, experts)

    def fill_experts(self, experts: np.ndarray | None) -> TokenRecord:
        """Fill in unknown expert ids. Known ones stay: sampling used them, while a continued request computed the tokens again."""
        if experts is None:
            return self
        told = _stacked([experts[: len(self)], _no_experts(max(0, len(self) - len(experts)))])
        return replace(self, experts=told if self.experts is None else np.where(self.experts < 0, told, self.experts))

    @staticmethod
    def given(token_ids: Sequence[int]) -> TokenRecord:
        """Record of tokens that the policy did not choose."""
        count = len(token_ids)
        return TokenRecord(np.fromiter(token_ids, np.int64, count), np.zeros(count, bool), np.zeros(count, np.float32))

    @staticmethod
    def chosen(completion: Completion) -> TokenRecord:
        count = len(completion.token_ids)
        assert len(completion.log_probs) == count, f"{completion.request_id}: tokens and log-probs differ in number"
        ids, log_probs = np.fromiter(completion.token_ids, np.int64, count), np.fromiter(completion.log_probs, np.float32, count)
        return TokenRecord(ids, np.ones(count, bool), log_probs, _kept_ids(completion))

    @staticmethod
    def joined(parts: Sequence[TokenRecord]) -> TokenRecord:
        """Concatenate records."""
        kept = None
        if any(part.kept_ids is not None for part in parts):
            kept = _stacked([_all_kept(len(part)) if part.kept_ids is None else part.kept_ids for part in parts])
        experts = None
        if any(part.experts is not None for part in parts):
            experts = _stacked([_no_experts(len(part)) if part.experts is None else part.experts for part in parts])
        ids, masks, log_probs = zip(*((part.ids, part.mask, part.log_probs) for part in parts), strict=True)
        return TokenRecord(np.concatenate(ids), np.concatenate(masks), np.concatenate(log_probs), kept, experts)

    @staticmethod
    def read(block: DataProto, row: int) -> TokenRecord:
        ids, mask = block.ragged("input_ids").row(row).numpy(), block.ragged("response_mask").row(row).numpy()
        # The first token of a row has no log-prob, since nothing predicts it.
        log_probs = np.concatenate([np.zeros(1, np.float32), block.ragged("rollout_log_probs").row(row).numpy()])
        kept = None
        if "kept_ids" in block:
            entries = block.ragged("kept_ids").row(row).numpy()
            kept = np.concatenate([np.full((1, entries.shape[1]), -1, np.int32), entries])
        experts = block.ragged(EXPERTS).row(row).numpy() if EXPERTS in block else None
        return TokenRecord(ids, mask, log_probs, kept, experts)


async def joined_row(request: GenerationRequest, parts: Sequence[TokenRow], fetch: Callable[[Any], Awaitable[DataProto]]) -> TokenRecord:
    """A sample so far: the request's context and prompt, then `parts`, whose first token is a dummy (completions.py)."""
    before = [] if request.context is None else [TokenRecord.read(await fetch(request.context.block), request.context.row)]
    new = [TokenRecord.read(await fetch(part.block), part.row).drop_prefix(1) for part in parts]
    return TokenRecord.joined([*before, TokenRecord.given(request.prompt_ids), *new])


def token_block(records: Sequence[TokenRecord], kept_ids: bool, experts: bool = False) -> DataProto:
    """Write records as rows of a block. `kept_ids`, `experts`: include these columns even if empty, so that all blocks of a batch agree."""
    assert all(len(record) for record in records), "a sample has tokens"
    whole = TokenRecord.joined([TokenRecord.given(()), *records])
    offsets = np.concatenate([[0], np.cumsum([len(record) for record in records], dtype=np.int64)])
    predicted = np.ones(len(whole), dtype=bool)
    predicted[offsets[:-1]] = False
    transitions = torch.from_numpy(offsets - np.arange(len(offsets)))
    columns = {
        "input_ids": Ragged(torch.from_numpy(whole.ids), torch.from_numpy(offsets)),
        "response_mask": Ragged(torch.from_numpy(whole.mask), torch.from_numpy(offsets)),
        "rollout_log_probs": Ragged(torch.from_numpy(whole.log_probs[predicted]), transitions),
    }
    if kept_ids:
        kept = _all_kept(len(whole)) if whole.kept_ids is None else whole.kept_ids
        columns["kept_ids"] = Ragged(torch.from_numpy(kept[predicted]), transitions)
    if experts:
        known = _no_experts(len(whole)) if whole.experts is None else whole.experts
        columns[EXPERTS] = Ragged(torch.from_numpy(known), torch.from_numpy(offsets))
    return DataProto(columns)


def _kept_ids(completion: Completion) -> np.ndarray | None:
    """[tokens, K] int32: ids that survived truncation, padded with -1."""
    of_tokens = completion.kept_ids
    if of_tokens is None:
        return None
    assert len(of_tokens) == len(completion.token_ids), f"{completion.request_id}: tokens and kept ids differ in number"
    counts = np.fromiter(map(len, of_tokens), dtype=np.int64, count=len(of_tokens))
    ids = np.full((len(of_tokens), max(1, int(counts.max(initial=0)))), -1, dtype=np.int32)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(of_tokens), dtype=np.int32)
    return ids


def _all_kept(tokens: int) -> np.ndarray:
    return np.full((tokens, 1), -1, dtype=np.int32)


def _no_experts(tokens: int) -> np.ndarray:
    return np.full((tokens, 1), -1, dtype=np.int16)


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays, padded with -1 to the widest."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in parts])
