"""Token blocks: tables of tokens. A row holds a sample's tokens so far: prompt, responses, environment messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Completion, GenerationRequest, TokenRow

BLOCK_TOKENS = 2**16
"""Tokens of a full block, about 850 KB. In larger blocks, readers of one row fetch more; smaller blocks need more references, at 100 to 200
microseconds each."""

TOKEN_COLUMNS = ("input_ids", "response_mask", "rollout_log_probs")
KEPT_IDS, EXPERTS = "kept_ids", "rollout_experts"
EXTRA_COLUMNS = {KEPT_IDS: np.int32, EXPERTS: np.int16}
"""Optional columns with several ids per token, padded with -1. KEPT_IDS: token ids that truncation kept; without truncation all -1.
EXPERTS: MoE experts; all -1 if unknown."""


@dataclass(frozen=True)
class TokenRecord:
    """Tokens of a sample. All arrays have length T."""

    ids: np.ndarray
    """[T] int64."""
    mask: np.ndarray
    """[T] bool: the policy chose the token."""
    log_probs: np.ndarray
    """[T] float32: log-prob under the sampling distribution; 0 where the mask is 0."""
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    """{name in EXTRA_COLUMNS: [T, K], K ids per token}. A missing column means all -1."""

    def __len__(self) -> int:
        return len(self.ids)

    def vectors(self, name: str) -> np.ndarray:
        return self.extra[name] if name in self.extra else _unknown(name, len(self))

    def drop_prefix(self, first: int) -> TokenRecord:
        extra = {name: column[first:] for name, column in self.extra.items()}
        return TokenRecord(self.ids[first:], self.mask[first:], self.log_probs[first:], extra)

    def masked(self) -> TokenRecord:
        extra = {name: column for name, column in self.extra.items() if name != KEPT_IDS}
        return replace(self, mask=np.zeros_like(self.mask), log_probs=np.zeros_like(self.log_probs), extra=extra)

    def fill_experts(self, experts: np.ndarray | None) -> TokenRecord:
        """Fill unknown expert ids with the engine's. Known ids stay, since sampling used them; a prefill may choose others."""
        if experts is None:
            return self
        told = _stacked([experts[: len(self)], _unknown(EXPERTS, max(0, len(self) - len(experts)))])
        known = self.extra.get(EXPERTS)
        return replace(self, extra={**self.extra, EXPERTS: told if known is None else np.where(known < 0, told, known)})

    @staticmethod
    def given(token_ids: Sequence[int]) -> TokenRecord:
        count = len(token_ids)
        return TokenRecord(np.fromiter(token_ids, np.int64, count), np.zeros(count, bool), np.zeros(count, np.float32))

    @staticmethod
    def chosen(completion: Completion) -> TokenRecord:
        count = len(completion.token_ids)
        assert len(completion.log_probs) == count, f"{completion.request_id}: tokens and log-probs differ in number"
        ids, log_probs = np.fromiter(completion.token_ids, np.int64, count), np.fromiter(completion.log_probs, np.float32, count)
        kept = {} if completion.kept_ids is None else {KEPT_IDS: _padded(completion.kept_ids)}
        assert all(len(column) == count for column in kept.values()), f"{completion.request_id}: tokens and kept ids differ in number"
        return TokenRecord(ids, np.ones(count, bool), log_probs, kept)

    @staticmethod
    def joined(parts: Sequence[TokenRecord]) -> TokenRecord:
        extra = {name: _stacked([part.vectors(name) for part in parts]) for name in dict.fromkeys(chain(*(part.extra for part in parts)))}
        ids, masks, log_probs = zip(*((part.ids, part.mask, part.log_probs) for part in parts), strict=True)
        return TokenRecord(np.concatenate(ids), np.concatenate(masks), np.concatenate(log_probs), extra)

    @staticmethod
    def read(block: DataProto, row: int) -> TokenRecord:
        ids, mask = block.ragged("input_ids").row(row).numpy(), block.ragged("response_mask").row(row).numpy()
        # Nothing predicts the first token of a row.
        log_probs = np.concatenate([np.zeros(1, np.float32), block.ragged("rollout_log_probs").row(row).numpy()])
        extra = {name: block.ragged(name).row(row).numpy() for name in EXTRA_COLUMNS if name in block}
        if KEPT_IDS in extra:
            extra[KEPT_IDS] = _stacked([_unknown(KEPT_IDS, 1), extra[KEPT_IDS]])
        return TokenRecord(ids, mask, log_probs, extra)


async def joined_block(request: GenerationRequest, parts: Sequence[TokenRow], fetch: Callable[[Any], Awaitable[DataProto]]) -> DataProto:
    """Return a block with one row: a sample's tokens so far. `parts`: pieces of the response, with dummy first tokens."""
    rows = [*([] if request.context is None else [request.context]), *parts]
    blocks = {row.block: await fetch(row.block) for row in rows}
    columns = [name for name in EXTRA_COLUMNS if name in blocks[parts[0].block]]
    return token_block([joined_record(request, parts, lambda row: TokenRecord.read(blocks[row.block], row.row))], columns)


def joined_record(request: GenerationRequest, parts: Sequence[TokenRow], read: Callable[[TokenRow], TokenRecord]) -> TokenRecord:
    before = [] if request.context is None else [context_record(request, read(request.context))]
    return TokenRecord.joined([*before, TokenRecord.given(request.prompt_ids), *(read(part).drop_prefix(1) for part in parts)])


def context_record(request: GenerationRequest, earlier: TokenRecord) -> TokenRecord:
    return earlier.masked() if request.masks_context else earlier


def token_block(records: Sequence[TokenRecord], extra: Collection[str] = ()) -> DataProto:
    """Return a block with a row per record. `extra`: further columns, -1 where a record has no data."""
    assert all(len(record) for record in records), "a sample has tokens"
    whole = TokenRecord.joined([TokenRecord.given(()), *records])
    offsets = np.concatenate([[0], np.cumsum([len(record) for record in records], dtype=np.int64)])
    predicted = np.ones(len(whole), dtype=bool)
    predicted[offsets[:-1]] = False
    tokens, transitions = torch.from_numpy(offsets), torch.from_numpy(offsets - np.arange(len(offsets)))
    columns = {
        "input_ids": Ragged(torch.from_numpy(whole.ids), tokens),
        "response_mask": Ragged(torch.from_numpy(whole.mask), tokens),
        "rollout_log_probs": Ragged(torch.from_numpy(whole.log_probs[predicted]), transitions),
    }
    if KEPT_IDS in extra:
        columns[KEPT_IDS] = Ragged(torch.from_numpy(whole.vectors(KEPT_IDS)[predicted]), transitions)
    if EXPERTS in extra:
        columns[EXPERTS] = Ragged(torch.from_numpy(whole.vectors(EXPERTS)), tokens)
    return DataProto(columns)


def _padded(kept_ids: Sequence[Sequence[int]]) -> np.ndarray:
    counts = np.fromiter(map(len, kept_ids), dtype=np.int64, count=len(kept_ids))
    ids = np.full((len(kept_ids), max(1, int(counts.max(initial=0)))), -1, dtype=np.int32)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(kept_ids), dtype=np.int32)
    return ids


def _unknown(name: str, tokens: int) -> np.ndarray:
    return np.full((tokens, 1), -1, dtype=EXTRA_COLUMNS[name])


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in parts])
