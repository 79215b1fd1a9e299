"""Attention over packed rows, by itself; whole models are compared in test_megatron_oracle.py."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from roll_lite.distributed.strategy.megatron import layers
from roll_lite.distributed.strategy.megatron import strategy as _  # noqa: F401  (prepares megatron.core)
from roll_lite.distributed.strategy.megatron.layers import SdpaAttention
from roll_lite.distributed.strategy.megatron.packed_rows import ContextCut, PackedRows

HEADS, KEYS, WIDTH = 4, 2, 8


def attention(window: int | None = None, heads: int = HEADS, keys: int = KEYS, width: int = WIDTH) -> SdpaAttention:
    window_size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(kv_channels=width, num_attention_heads=heads, num_query_groups=keys, window_size=window_size)
    return SdpaAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None, tp=SimpleNamespace(size=lambda: 1)))


def test_rows_by_hand() -> None:
    rows = PackedRows.of(torch.tensor([3, 3, 1, 3]))
    assert rows.runs == ((2, 3, 3), (1, 1, 1), (1, 3, 3)) and rows.longest == 3
    assert rows.places.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2]
    assert rows.starts.tolist() == [0, 3, 6, 7, 10] and rows.starts.dtype == torch.int32


def test_the_part_of_a_rank_by_hand() -> None:
    """Rows of 5 and 3 tokens for two ranks, parts of two: a a | a a | a b | b b. The first rank has the first part and the last, the second
    those between. Tokens of all, rank by rank: 0 1 6 7 2 3 4 5."""
    lengths = torch.tensor([5, 3])
    first, second = (PackedRows.of_rank(lengths, ContextCut(8, rank, 2)) for rank in (0, 1))
    assert first.runs == ((1, 2, 2), (1, 2, 3)) and first.places.tolist() == [0, 1, 1, 2]
    assert second.runs == ((1, 2, 4), (1, 1, 5), (1, 1, 1)) and second.places.tolist() == [2, 3, 4, 0]
    assert first.key_index is not None and second.key_index is not None
    assert first.key_index.tolist() == [0, 1, 7, 2, 3]
    assert second.key_index.tolist() == [0, 1, 4, 5, 0, 1, 4, 5, 6, 7]
    cut = ContextCut(8, 0, 2)
    assert cut.own(torch.arange(8)).tolist() == [0, 1, 6, 7]
    here, places = cut.find(torch.tensor([7, 2, 0]))
    assert here.tolist() == [True, False, True] and places.tolist() == [3, 0]


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [6, 3, 3, 1], [1, 7, 2, 2, 7]])
def test_every_row_is_by_itself(lengths: list[int]) -> None:
    """Values and gradients, against the formula written out for each row and head."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), 1, heads, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (HEADS, KEYS, KEYS)
    )
    weights = torch.randn(sum(lengths), 1, HEADS * WIDTH, dtype=torch.float64)
    found = attention()(query, key, value, None, packed_seq_params=PackedRows.of(torch.tensor(lengths)))
    ours = torch.autograd.grad((found * weights).sum(), (query, key, value))

    parts = []
    for q, k, v in zip(*(each[:, 0].split(lengths) for each in (query, key, value)), strict=True):
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        heads = [
            ((q[:, head] @ k[:, head // 2].T) / WIDTH**0.5).masked_fill(future, -torch.inf).softmax(dim=1) @ v[:, head // 2]
            for head in range(HEADS)
        ]
        parts.append(torch.cat(heads, dim=1))
    expected = torch.cat(parts)[:, None]
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, theirs)


def test_a_window_by_hand() -> None:
    """A window of 2: each token attends to itself and the one before it, whatever of its row is elsewhere."""
    masks = attention(window=2)
    whole, part = masks._before(3, 3, torch.device("cpu")), masks._before(2, 4, torch.device("cpu"))
    assert whole is not None and whole.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert part is not None and part.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert masks._before(2, 2, torch.device("cpu")) is None, "the row is no longer than the window"


def test_on_a_gpu_flash_attention_takes_all_rows_at_once() -> None:
    """Tensors without contents on a device that is not there: the call is one that torch accepts, and everything stays on the device."""
    with FakeTensorMode(), patch.object(layers, "varlen_attn", wraps=layers.varlen_attn) as called:
        places, starts = torch.empty(13, dtype=torch.int64, device="cuda"), torch.empty(4, dtype=torch.int32, device="cuda")
        rows = PackedRows(((2, 5, 5), (1, 3, 3)), places, starts, 5, row_of=places, lengths=starts)
        parts = [torch.empty(13, 1, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (HEADS, KEYS, KEYS)]
        for window in (None, 4):
            found = attention(window)(*parts, None, packed_seq_params=rows)
            assert (found.shape, found.dtype, found.device.type) == ((13, 1, HEADS * 64), torch.bfloat16, "cuda")
    assert [call.kwargs["window_size"] for call in called.call_args_list] == [(-1, 0), (3, 0)]
