"""From sample groups to the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Sample, SampleGroup


@dataclass(frozen=True)
class Extras:
    """Columns that not every batch has. Decided for a whole batch, so that its blocks agree."""

    baselines: bool = False
    """baseline_score."""
    kept_ids: bool = False
    """kept_ids."""

    @staticmethod
    def of(groups: Sequence[SampleGroup]) -> Extras:
        return Extras(
            baselines=any(group.baseline is not None for group in groups),
            kept_ids=any(sample.completion.kept_ids is not None for group in groups for sample in group.samples),
        )


def columns_of(groups: Sequence[SampleGroup], first_sample: int = 0, extras: Extras | None = None) -> DataProto:
    """One row for each sample of the groups, numbered from `first_sample` on. Every sample must be accepted and scored.

    Ragged columns are filled in one go over all rows: no Python runs per token.
    """
    extras = extras or Extras.of(groups)
    samples = [sample for group in groups for sample in group.samples]
    columns = {**_row_columns(samples, first_sample), **_token_columns(samples, extras.kept_ids)}
    if extras.baselines:
        columns["baseline_score"] = torch.tensor(_baseline_scores(groups), dtype=torch.float32)
    return DataProto(columns)


def row_columns_of(groups: Sequence[SampleGroup]) -> DataProto:
    """The same without tokens and baselines."""
    return DataProto(_row_columns([sample for group in groups for sample in group.samples], 0))


def rows_and_tokens(columns: DataProto) -> tuple[DataProto, DataProto]:
    """What goes to the driver, and what stays in the object store (with the sample's number, to find each other again)."""
    tokens = [name for name in columns.columns if isinstance(columns[name], Ragged)]
    return columns.drop(tokens), columns.select(["sample", *tokens])


def _row_columns(samples: Sequence[Sample], first_sample: int) -> dict[str, torch.Tensor | np.ndarray]:
    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    scores = [sample.score for sample in samples]
    assert all(score is not None for score in scores), "a sample without a score cannot train"
    response_lengths = whole([len(sample.completion.token_ids) for sample in samples])
    return {
        "sample": torch.arange(first_sample, first_sample + len(samples)),
        "group": whole([sample.id.group for sample in samples]),
        "index": whole([sample.id.index for sample in samples]),
        "prompt_uid": whole([sample.id.prompt_uid for sample in samples]),
        "epoch": whole([sample.id.epoch for sample in samples]),
        "attempt": whole([sample.id.attempt for sample in samples]),
        "domain": object_column(sample.id.domain for sample in samples),
        "finish_reason": object_column(str(sample.completion.finish_reason) for sample in samples),
        "prompt_length": whole([len(sample.prompt.token_ids) for sample in samples]),
        "response_length": response_lengths,
        "policy_tokens": response_lengths.clone(),
        "score": torch.tensor([score.value for score in scores if score is not None], dtype=torch.float32),
        "correct": torch.tensor([float(score.is_correct) for score in scores if score is not None], dtype=torch.float32),
        "format_ok": torch.tensor([float(score.format_ok or False) for score in scores if score is not None], dtype=torch.float32),
        "sample_weight": torch.tensor([sample.prompt.weight for sample in samples], dtype=torch.float32),
        "min_version": whole([min((span.version for span in sample.completion.versions), default=0) for sample in samples]),
    }


def _baseline_scores(groups: Sequence[SampleGroup]) -> list[float]:
    """One for each row: that of its group."""
    scores: list[float] = []
    for group in groups:
        assert group.baseline is not None and group.baseline.score is not None, f"group {group.group} has no scored greedy baseline"
        scores += [group.baseline.score.value] * len(group.samples)
    return scores


def _token_columns(samples: Sequence[Sample], kept_ids: bool) -> dict[str, Ragged]:
    prompts = [sample.prompt.token_ids for sample in samples]
    responses = [sample.completion.token_ids for sample in samples]
    for sample in samples:
        assert sample.prompt.token_ids, f"sample {sample.id} has an empty prompt"
        assert len(sample.completion.log_probs) == len(sample.completion.token_ids), (
            f"sample {sample.id}: tokens and log-probs differ in number"
        )
    lengths = np.array([[len(prompt), len(response)] for prompt, response in zip(prompts, responses, strict=True)], dtype=np.int64).reshape(
        -1, 2
    )
    rows = lengths.sum(axis=1)
    offsets = np.concatenate([[0], np.cumsum(rows)])
    ids = np.fromiter(chain.from_iterable(chain.from_iterable(zip(prompts, responses, strict=True))), dtype=np.int64, count=offsets[-1])
    mask = np.repeat(np.tile([False, True], len(samples)), lengths.ravel())
    # A row's transitions are its tokens but the first: entry t belongs to token t+1.
    predicted = np.ones(len(ids), dtype=bool)
    predicted[offsets[:-1]] = False
    log_probs = np.zeros(len(ids), dtype=np.float32)
    log_probs[mask] = np.fromiter(chain.from_iterable(sample.completion.log_probs for sample in samples), dtype=np.float32)
    transition_offsets = offsets - np.arange(len(offsets))
    columns = {
        "input_ids": Ragged(torch.from_numpy(ids), torch.from_numpy(offsets)),
        "response_mask": Ragged(torch.from_numpy(mask), torch.from_numpy(offsets)),
        "rollout_log_probs": Ragged(torch.from_numpy(log_probs[predicted]), torch.from_numpy(transition_offsets)),
    }
    if kept_ids:
        kept = _kept_ids(samples, mask)
        columns["kept_ids"] = Ragged(torch.from_numpy(kept[predicted]), torch.from_numpy(transition_offsets))
    return columns


def _kept_ids(samples: Sequence[Sample], mask: np.ndarray) -> np.ndarray:
    """mask [tokens] of all samples' response tokens -> [tokens, K] int32: the ids that survived truncation, then -1."""
    nothing: tuple[int, ...] = ()
    of_tokens: list[tuple[int, ...]] = []
    for sample in samples:
        kept = sample.completion.kept_ids
        assert kept is None or len(kept) == len(sample.completion.token_ids), f"sample {sample.id}: tokens and kept ids differ in number"
        of_tokens += [nothing] * len(sample.completion.token_ids) if kept is None else kept
    counts = np.zeros(len(mask), dtype=np.int64)
    counts[mask] = np.fromiter(map(len, of_tokens), dtype=np.int64, count=len(of_tokens))
    ids = np.full((len(mask), max(1, int(counts.max(initial=0)))), -1, dtype=np.int32)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(of_tokens), dtype=np.int32)
    return ids
