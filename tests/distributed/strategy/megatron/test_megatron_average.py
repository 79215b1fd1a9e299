"""The moving average of the weights, by numbers worked out beside the strategy from what it exports after every step."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_cases import assert_equal, batch_of, copied, hf_log_probs, own_weights, reported_once, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from safetensors.torch import load_file
from support_models import load_hf
from support_passes import forward, train_step

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs
from roll_lite.distributed.strategy.base import CheckpointWrite, StateGroup
from roll_lite.distributed.strategy.megatron import strategy as megatron_strategy
from roll_lite.distributed.strategy.megatron.checkpoint_writer import RunningSave
from roll_lite.distributed.strategy.megatron.hf_mapping import FINAL_NORM, Binding
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy, WeightAverage
from roll_lite.files import record

CONFIG = OptimizerConfig(lr=1e-2)
DECAY = 0.75
LAYOUTS: dict[str, dict[str, Any]] = {"one rank": {}, "DP2": {"data": 2}, "TP2": {"tensor_parallel": 2}, "PP2": {"pipeline_parallel": 2}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("average") / "model", "qwen2", vocab_size=101)


def test_by_hand() -> None:
    """Weights 0, then 1 and 2, halved each time: 0, 1/2, (1/2 + 2) / 2."""
    weight = torch.nn.Parameter(torch.tensor([0.0], dtype=torch.bfloat16))
    average = WeightAverage([Binding(FINAL_NORM, FINAL_NORM.hf, weight)], decay=0.5)
    found = [average.read(weight).item()]
    for value in (1.0, 2.0):
        weight.data.fill_(value)
        average.update()
        found.append(average.read(weight).item())
    assert found == [0.0, 0.5, 1.25]
    average.restart()
    assert average.read(weight).item() == 2.0 and average.read(weight).dtype == torch.float32


def begin(path: Path, layout: dict[str, Any], dtype: str = "float32", ema_decay: float | None = DECAY) -> MegatronStrategy:
    options = {name: size for name, size in layout.items() if name != "data"}
    return started(path, CONFIG, dtype, ema_decay=ema_decay, **options)


def step(strategy: MegatronStrategy, seed: int) -> None:
    train_step(strategy, shard(batch_of(seed=seed), strategy), weighted_loss, ["log_probs"], 3)


def nan_loss(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, metrics = weighted_loss(outputs, micro_batch)
    return loss * float("nan"), metrics


def averaged(path: Path, folder: Path, layout: dict[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    """Exported, saved and gone on with from the checkpoint; what the average should be, of the tensors that this rank owns."""
    strategy = begin(path, layout, dtype)
    mean = {name: weight.double() for name, weight in own_weights(strategy).items()}
    for seed in range(3):
        step(strategy, seed)
        mean = {name: DECAY * mean[name] + (1 - DECAY) * weight.double() for name, weight in own_weights(strategy).items()}
    assert train_step(strategy, shard(batch_of(), strategy), nan_loss, ["log_probs"], 3).skipped
    reported_once(folder / "average", strategy.save_hf(folder / "average", average=True))
    reported_once(folder / "checkpoint", strategy.save_checkpoint(folder / "checkpoint").files)
    copy = copied(strategy)
    running = started_with_nothing_written(strategy, folder / "beside")
    step(strategy, 3)
    strategy.save_hf(folder / "straight", average=True)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, running.finish())
    files = {str(file.relative_to(folder / "beside")): record(file) for file in (folder / "beside").rglob("*") if file.is_file()}
    assert {name: one for own in told for name, one in own.items()} == files and sum(map(len, told)) == len(files)
    go_on(path, folder, layout, dtype, "resumed")
    strategy.load_copy(copy)
    step(strategy, 3)
    strategy.save_hf(folder / "from_copy", average=True)
    return mean


def started_with_nothing_written(strategy: MegatronStrategy, folder: Path) -> CheckpointWrite:
    """The average's weights are left to the process that writes the rest."""

    class Save(RunningSave):
        def __init__(self, *given: Any) -> None:
            assert strategy.layout.world_size > 1 or not list(folder.rglob("*.safetensors"))
            super().__init__(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_strategy, "RunningSave", Save)
        return strategy.save_checkpoint(folder, asynchronous=True)


def go_on(path: Path, folder: Path, layout: dict[str, Any], dtype: str, name: str) -> None:
    resumed = begin(path, layout, dtype)
    step(resumed, 7)  # anything: loading must overwrite it
    resumed.load_checkpoint(folder / "checkpoint")
    step(resumed, 3)
    resumed.save_hf(folder / name, average=True)


def check_average(ranks: RankPool, path: Path, tmp_path: Path, layout: dict[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    """Its tensors after the last step."""
    found = ranks(2 if layout else 1, averaged, path, tmp_path, layout, dtype)
    expected = {key: mean for own in found for key, mean in own.items()}
    exported, straight, resumed, from_copy = (load_all(tmp_path / folder) for folder in ("average", "straight", "resumed", "from_copy"))
    assert exported.keys() == expected.keys() == load_file(path / "model.safetensors").keys()
    for key, mean in expected.items():
        assert exported[key].dtype == getattr(torch, dtype)
        # A number in the middle of two of bfloat16 may go either way.
        torch.testing.assert_close(exported[key].double(), mean, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6)
    for again in (resumed, from_copy):
        assert_equal(straight, again)
    assert any(not torch.equal(straight[key], exported[key]) for key in expected)
    in_checkpoint, beside = (load_all(tmp_path / name / "ema") for name in ("checkpoint", "beside"))
    assert beside.keys() == in_checkpoint.keys() and all(torch.equal(beside[key], in_checkpoint[key]) for key in beside)
    for key, mean in expected.items():
        torch.testing.assert_close(in_checkpoint[key].double(), mean, rtol=1e-5, atol=1e-6)  # float32, whatever the weights are
    return straight


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_average_is_exported_and_saved_in_every_layout(ranks: RankPool, path: Path, tmp_path: Path, name: str) -> None:
    dtype = "bfloat16" if name == "DP2" else "float32"
    straight = check_average(ranks, path, tmp_path, LAYOUTS[name], dtype)
    if name == "TP2":
        ranks(1, go_on, path, tmp_path, {}, dtype, "elsewhere")
        for key, one in load_all(tmp_path / "elsewhere").items():
            torch.testing.assert_close(one, straight[key], rtol=0, atol=2e-5)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


OF_EXPERTS: dict[str, dict[str, Any]] = {
    "EP2": {"data": 2, "expert_parallel": 2},
    "ETP2": {"expert_tensor_parallel": 2},
    "VPP2": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.nightly
def test_the_average_of_experts(ranks: RankPool, tmp_path: Path) -> None:
    """Saved where ranks share the experts, gone on with where one has all."""
    path = tiny(tmp_path / "model", "qwen3_moe", tied=False, layers=4)
    for name, layout in OF_EXPERTS.items():
        straight = check_average(ranks, path, tmp_path / name, layout, "float32")
        ranks(1, go_on, path, tmp_path / name, {}, "float32", "elsewhere")
        for key, one in load_all(tmp_path / name / "elsewhere").items():
            torch.testing.assert_close(one, straight[key], rtol=0, atol=2e-5)


def order_of_work(path: Path) -> list[str]:
    """An average is held back until somebody waits for it."""
    strategy = begin(path, {})
    average, optimizer = strategy._average, strategy._optimizer
    assert average is not None and optimizer is not None
    take, wait, change, goes = average._take_weights, average.wait, optimizer.step, threading.Event()
    order: list[str] = []

    def taken(stream: Any) -> None:
        goes.wait()
        take(stream)
        order.append("averaged")

    def waited() -> None:
        if average._update is not None:
            order.append("waits")
            goes.set()
            wait()
            goes.clear()

    def changed(loss: float) -> Any:
        order.append("changed")
        return change(loss)

    with patch.object(average, "_take_weights", taken), patch.object(average, "wait", waited), patch.object(optimizer, "step", changed):
        step(strategy, 0)
        forward(strategy, batch_of(), ["log_probs"], 3)
        own_weights(strategy)
        order.append("passes and transfers")
        step(strategy, 1)
        strategy.offload([StateGroup.WEIGHTS])
        order.append("offloaded")
    return order


def test_a_step_ends_before_its_average_and_the_next_change_waits_for_it(ranks: RankPool, path: Path) -> None:
    (order,) = ranks(1, order_of_work, path)
    assert order == ["changed", "passes and transfers", "waits", "averaged", "changed", "waits", "averaged", "offloaded"]


def start_late(path: Path, folder: Path) -> None:
    """An average that is asked for after a while begins with the weights of then."""
    without = begin(path, {}, ema_decay=None)
    step(without, 0)
    without.save_checkpoint(folder)
    resumed = begin(path, {})
    resumed.load_checkpoint(folder)
    resumed.save_hf(folder / "average", average=True)
    resumed.save_hf(folder / "weights")


def test_a_checkpoint_from_before_there_was_an_average(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(1, start_late, path, tmp_path)
    weights = load_all(tmp_path / "weights")
    assert all(torch.equal(one, weights[name]) for name, one in load_all(tmp_path / "average").items())
    assert any(not torch.equal(one, weights[name]) for name, one in load_file(path / "model.safetensors").items())


def renewed(path: Path, other: Path) -> None:
    """A model for forward passes takes other weights, also into those that its last stage holds a copy of."""
    reference = started(path, pipeline_parallel=2)
    for given in (None, other):  # what the host keeps of the earlier weights is not what comes back
        if given is not None:
            reference.load_hf(given)
        reference.offload(StateGroup)
        reference.load(StateGroup)
    batch, oracle = batch_of(), load_hf(other)
    out = forward(reference, batch, ["log_probs"], 3)
    for row in range(len(batch)) if out is not None else ():
        log_probs, _ = hf_log_probs(oracle, batch.ragged("input_ids").row(row), batch.tensor("temperature")[row])
        mask = batch.ragged("response_mask").row(row)[1:]
        torch.testing.assert_close(out.ragged("log_probs").row(row), log_probs * mask, rtol=1e-5, atol=1e-5)


def test_a_reference_takes_other_weights(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(2, renewed, path, tiny(tmp_path / "other", "qwen2", vocab_size=101, seed=5))
