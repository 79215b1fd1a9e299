"""AdamW's moments on the host, beside weights that are on another device."""

from __future__ import annotations

import pytest
import torch

from roll_lite.distributed.strategy.megatron.optimizer import HostStep


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_on_the_host_from_the_start_and_after_loading(dtype: torch.dtype) -> None:
    """The device has no memory at all (meta): what would be made there first could not be brought back."""
    weights = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in ((3, 4), (5,))]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:]}])
    HostStep(optimizer, torch.device("cpu"))
    for weight in weights:
        state = optimizer.state[weight]
        assert sorted(state) == ["exp_avg", "exp_avg_sq"]
        for moment in state.values():
            assert (moment.device.type, moment.dtype, moment.shape) == ("cpu", dtype, weight.shape) and not moment.any()
    before = {weight: dict(optimizer.state[weight]) for weight in weights}
    groups = [{**group, "lr": 0.5} for group in optimizer.state_dict()["param_groups"]]
    ones, step = [torch.ones(weight.shape, dtype=dtype) for weight in weights], torch.tensor(3.0)
    states = {number: {"step": step, "exp_avg": one, "exp_avg_sq": 2 * one} for number, one in enumerate(ones)}
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    for weight in weights:
        state = optimizer.state[weight]
        assert state["step"] == 3 and all(state[name] is moment for name, moment in before[weight].items()), "no further memory"
        assert (state["exp_avg"] == 1).all() and (state["exp_avg_sq"] == 2).all()
