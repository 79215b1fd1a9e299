"""AdamW's moments on the host, beside weights that are on another device."""

from __future__ import annotations

import pytest
import torch

from roll_lite.distributed.strategy.megatron.optimizer import HostStep


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_on_the_host_from_the_start(dtype: torch.dtype) -> None:
    """The device has no memory at all (meta): what would be made there first could not be brought back."""
    weights = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in ((3, 4), (5,))]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:]}])
    HostStep(optimizer, torch.device("cpu")).keep_moments()
    for weight in weights:
        state = optimizer.state[weight]
        assert sorted(state) == ["exp_avg", "exp_avg_sq"]
        for moment in state.values():
            assert (moment.device.type, moment.dtype, moment.shape) == ("cpu", dtype, weight.shape) and not moment.any()
