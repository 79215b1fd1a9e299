"""Rows of `algorithm.ptx` (supervised data beside the policy loss) in a seeded, resumable order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roll_lite.config.schema.algorithm import PtxConfig
from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.minibatches import balanced_partition, row_costs
from roll_lite.data.prompts import PromptOrder, load_prompts
from roll_lite.data.proto import VECTORS, Column, DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.templates import Tokenizer


class SupervisedRows:
    def __init__(self, config: PtxConfig, tokenizer: Tokenizer, seed: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        try:
            self._prompts = load_prompts("ptx", config.as_domain, "train", tokenizer)
        except ValueError as error:
            raise ValueError(str(error).replace("domains.ptx", "algorithm.ptx")) from error
        is_full = [config.data.answer is not None and length >= config.max_tokens for length in self._prompts.lengths]
        self._full = {number for number, full in enumerate(is_full) if full}
        if all(is_full):
            raise ValueError(f"algorithm.ptx.max_tokens: all prompts have {config.max_tokens} tokens or more, no answer has room; use more")
        self._order = PromptOrder(len(self._prompts), seed, "ptx")
        self._before = self._order.state_dict()

    def notes(self) -> list[str]:
        full, rows = len(self._full), len(self._prompts)
        return [f"algorithm.ptx.max_tokens: {full} of {rows} rows are left out: their prompt leaves no room for the answer"] if full else []

    def draw(self) -> DataProto:
        """Draw one optimizer step's rows. `ptx_weight` is algorithm.ptx.coef / number of learned tokens, so the weighted sum of
        cross-entropies is coef times their mean."""
        rows = [self._row(self._next()) for _ in range(self._config.samples)]
        targets = sum(int(counts[1:].sum()) for _, counts in rows)
        return DataProto(
            {
                "sample": torch.arange(-len(rows), 0),  # negative, since policy rows have numbers from 0
                "input_ids": Ragged.from_rows([ids for ids, _ in rows]),
                "response_mask": Ragged.from_rows([counts for _, counts in rows]),
                "temperature": torch.ones(len(rows)),
                "ptx_weight": torch.full((len(rows),), self._config.coef / max(targets, 1)),
            }
        )

    def shares(self, updates: int, ranks: int, attention_parity_tokens: float) -> list[list[DataProto]]:
        """Draw the rows of `updates` optimizer steps, each split over the ranks at about equal cost: [rank][step]."""
        self._before = self._order.state_dict()
        drawn = [self.draw() for _ in range(updates)]
        parts = [balanced_partition(row_costs(rows.lengths.numpy(), attention_parity_tokens), ranks) for rows in drawn]
        return [[rows.take(part[rank]) for rows, part in zip(drawn, parts, strict=True)] for rank in range(ranks)]

    def _next(self) -> int:
        while (number := self._order.next()[1]) in self._full:
            pass
        return number

    def take_back(self, made: int) -> None:
        """Take back the rows of the last `shares` after its first `made` steps."""
        self._order.load_state_dict(self._before)
        for _ in range(made * self._config.samples):
            self._next()

    def _row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of a row, and mask of tokens to learn: answer and end of sequence; without answer column: all."""
        prompt, first = self._prompts[number], 0
        ids = list(prompt.token_ids)
        if self._config.data.answer is not None:
            first = len(ids)
            ids += self._tokenizer(str(prompt.answer), add_special_tokens=False, verbose=False)["input_ids"]
        if self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
        tokens = torch.tensor(ids[: self._config.max_tokens])
        return tokens, torch.arange(len(tokens)) >= first

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["count"] != (rows := len(self._prompts)):
            message = f"algorithm.ptx.data has {rows} rows, and had {state['count']} when the checkpoint was written"
            raise ValueError(f"{message}: their order would be another one; go on with the same data")
        self._order.load_state_dict(state)


def append_supervised(own: DataProto, supervised: DataProto) -> DataProto:
    """Append supervised rows to the rows of samples. Columns that supervised rows lack are padding."""
    lengths = supervised.lengths
    missing = {name: _nothing(name, column, lengths) for name, column in own.columns.items() if name not in supervised}
    return DataProto.concat([own.with_columns(ptx_weight=torch.zeros(len(own))), supervised.with_columns(**missing)])


def _nothing(name: str, like: Column, lengths: torch.Tensor) -> Column:
    if isinstance(like, Ragged):
        entries = lengths - 1 if KEYS[name].kind is Kind.TRANSITIONS else lengths
        fill, width = VECTORS.get(name, 0), like.values.shape[1:]
        return Ragged.from_rows([torch.full((count, *width), fill, dtype=like.dtype) for count in entries.tolist()], like.dtype)
    assert isinstance(like, torch.Tensor), f"{name}: losses read no objects"
    return torch.zeros(len(lengths), dtype=like.dtype)
