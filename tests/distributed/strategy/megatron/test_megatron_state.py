"""State that leaves and comes back: offloading frees storages and changes no bit; checkpoints resume, also under another layout."""

import logging
import math
import os
import shutil
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron_cases import (
    assert_equal,
    assert_repeats,
    batch_of,
    copied,
    optimizer_of,
    own_weights,
    parameters_of,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import DEVICE, RankPool
from support_passes import forward, train_step
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from roll_lite.config.schema.models import LoraConfig, OptimizerConfig
from roll_lite.distributed.strategy.base import StateGroup, TrainResult
from roll_lite.distributed.strategy.megatron import strategy as strategy_module
from roll_lite.distributed.strategy.megatron.checkpoint import STATE_FOLDER, _sharded_state
from roll_lite.distributed.strategy.megatron.checkpoint_writer import RunningSave
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy
from roll_lite.files import FileRecord, record

from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip  (roll_lite prepares megatron.core)
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=3, decay="linear")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP2": {"data": 2},
    "DP2 replicated": {"data": 2, "distributed_optimizer": False},
    "TP2": {"tensor_parallel": 2},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("state") / "model", "qwen3", vocab_size=101)


def begin(path: Path, layout: dict[str, Any], dtype: str = "float32") -> MegatronStrategy:
    """`data` of a layout follows from the number of ranks."""
    options = {"dtype": dtype, **{name: value for name, value in layout.items() if name != "data"}}
    return started(path, CONFIG, total_updates=20, **options)


def steps(strategy: MegatronStrategy, numbers: range) -> list[TrainResult]:
    results = []
    for number in numbers:
        batch = shard(batch_of(seed=number), strategy, [5, 1] if strategy.layout.data_size == 2 else None)
        outputs = ["values"] if strategy._value_head else ["log_probs", "entropy"]
        results.append(train_step(strategy, batch, weighted_loss, outputs, 3))
    return results


def same_weights(ours: MegatronStrategy, theirs: MegatronStrategy) -> None:
    assert_equal(own_weights(ours), own_weights(theirs))


# ---------------------------------------------------------------- offloading


def parameters_bytes(strategy: MegatronStrategy) -> int:
    return sum(storage.nbytes() for storage in {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters_of(strategy)}.values())


def offload_and_go_on(path: Path, layout: dict[str, Any], dtype: str) -> None:
    strategy, undisturbed = begin(path, layout, dtype), begin(path, layout, dtype)
    numel = sum(parameter.numel() for parameter in parameters_of(strategy))
    width = 4 if dtype == "float32" else 2
    shards = 2 if layout.get("data") and layout.get("distributed_optimizer", True) else 1
    moments = 2 * 4 * numel / shards
    main_weights = 0 if dtype == "float32" else 4 * numel / shards
    expected = {StateGroup.WEIGHTS: width * numel, StateGroup.GRADIENTS: 4 * numel, StateGroup.OPTIMIZER: moments + main_weights}
    storages = {group: strategy._mover._storages(group) for group in StateGroup}
    sizes = {group: sum(storage.nbytes() for storage in storages[group]) for group in StateGroup}

    for number, groups in enumerate(([], [StateGroup.OPTIMIZER], [StateGroup.WEIGHTS, StateGroup.GRADIENTS], list(StateGroup))):
        moved = Counter(strategy.offload(groups))
        moved.update(strategy.offload(groups))  # a second time changes nothing
        for group in StateGroup:
            resident = sum(storage.nbytes() for storage in storages[group])
            if group in groups:
                assert resident == 0, f"{group}: {resident} bytes are still there"
            else:
                assert 0.9 * expected[group] <= resident <= 1.2 * expected[group] + 20_000, f"{group}: {resident}, not {expected[group]}"
        assert (parameters_bytes(strategy) == 0) == (StateGroup.WEIGHTS in groups)
        if StateGroup.WEIGHTS in groups:
            with pytest.raises(AssertionError, match="weights are offloaded"):
                forward(strategy, batch_of(), ["log_probs"], 2)
        if groups == [StateGroup.OPTIMIZER]:
            # Weight sync and forward passes need the weights alone.
            forward(strategy, shard(batch_of(), strategy), ["log_probs"], 2)
            same_weights(strategy, undisturbed)
        moved.update(strategy.load(groups))
        moved.update(strategy.load(groups))
        copied_only_where_changed(strategy, groups, sizes, moved)
        taken, expected_steps = (steps(one, range(number, number + 1)) for one in (strategy, undisturbed))
        assert_repeats(taken, expected_steps, 1e-4 if dtype == "float32" else 3e-2)
    same_weights(strategy, undisturbed)


def copied_only_where_changed(
    strategy: MegatronStrategy, groups: list[StateGroup], sizes: dict[StateGroup, int], away_once: Counter[str]
) -> None:
    """`groups` have been away since the last step and are back: an offload copied what the step had changed, another one copies nothing."""
    copies = sum(sizes[group] for group in groups if group is not StateGroup.GRADIENTS)
    assert (away_once["freed"], away_once["out"]) == (sum(sizes[group] for group in groups), copies)
    assert away_once["in"] == copies
    forward(strategy, shard(batch_of(), strategy), ["log_probs"], 2)
    assert strategy.offload(groups) == {"freed": away_once["freed"], "out": 0}
    assert strategy.load(groups) == {"in": copies}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_offloading_frees_memory_and_changes_no_bit(ranks: RankPool, path: Path, name: str) -> None:
    world_size = 1 if not LAYOUTS[name] else 2
    for dtype in ("float32", "bfloat16") if name in ("one rank", "DP2") else ("float32",):
        ranks(world_size, offload_and_go_on, path, LAYOUTS[name], dtype)


def resident() -> int:
    return psutil.Process().memory_info().rss


def offload_a_larger_one(path: Path) -> None:
    """On a CPU the host's copies lie in the same memory, and stay there: what leaves is what the device had."""
    strategy = begin(path, {})
    steps(strategy, range(1))
    strategy.offload(StateGroup)  # and what the step has left lying about
    strategy.load(StateGroup)
    size = sum(storage.nbytes() for group in StateGroup for storage in strategy._mover._storages(group))
    before = resident()
    strategy.offload(StateGroup)
    away = resident()
    strategy.load(StateGroup)
    assert size > 200e6
    assert before - away == pytest.approx(size, rel=0.05)
    assert resident() - away == pytest.approx(size, rel=0.05)


@pytest.mark.skipif(DEVICE == "cuda", reason="of a CPU's memory; test_offload.py has a GPU's")
def test_resident_memory_falls_by_what_is_offloaded(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks(1, offload_a_larger_one, tiny(tmp_path_factory.mktemp("larger") / "model", vocab_size=101, hidden=512, layers=6))


def offload_a_reference(path: Path) -> None:
    strategy = started(path)
    assert not any(parameter.requires_grad for parameter in parameters_of(strategy))
    before = forward(strategy, batch_of(), ["log_probs"], 2)
    strategy.offload(StateGroup)
    assert parameters_bytes(strategy) == 0
    strategy.load(StateGroup)
    after = forward(strategy, batch_of(), ["log_probs"], 2)
    assert before is not None
    assert after is not None
    assert_equal({"log_probs": after.ragged("log_probs").values}, {"log_probs": before.ragged("log_probs").values}, 1e-5)
    with pytest.raises(AssertionError, match="without an optimizer"):
        train_step(strategy, batch_of(), weighted_loss, ["log_probs"], 2)


def test_a_forward_only_role_has_weights_to_move_and_nothing_else(ranks: RankPool, path: Path) -> None:
    ranks(1, offload_a_reference, path)


def update_on_host(path: Path, folder: Path, layout: dict[str, Any], dtype: str) -> None:
    """The same updates as torch's own, but for the last bits, in which its fused kernel differs; also after a checkpoint of either."""
    options = {"dtype": dtype, **{name: value for name, value in layout.items() if name != "data"}}
    ours, loaded = (started(path, CONFIG.model_copy(update={"on_host": True}), total_updates=20, **options) for _ in range(2))
    theirs = begin(path, layout, dtype)

    def agree(strategy: MegatronStrategy, numbers: range) -> None:
        for mine, other in zip(steps(strategy, numbers), steps(theirs, numbers), strict=True):
            assert (mine.loss, mine.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5 if dtype == "float32" else 2e-2)
        expected = own_weights(theirs)
        for name, tensor in own_weights(strategy).items():
            # In bfloat16 a last bit is 2^-7 of the number.
            rtol, atol = (0, 1e-6) if dtype == "float32" else (2**-7, 1e-3)
            torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol)

    agree(ours, range(3))
    moments = [
        state[name] for part in optimizer_of(ours).parts for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    ours.offload(StateGroup)
    assert all(moment.untyped_storage().nbytes() > 0 for moment in moments), "they have never been on the device"
    ours.load(StateGroup)
    (ours if dtype == "float32" else theirs).save_checkpoint(folder)
    loaded.load_checkpoint(folder)
    agree(loaded, range(3, 5))
    ours.load_copy(copied(loaded))
    agree(ours, range(5, 7))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_optimizers_step_on_the_host_is_the_same_step(ranks: RankPool, path: Path, tmp_path: Path, name: str) -> None:
    world_size = 1 if not LAYOUTS[name] else 2
    for dtype in ("float32", "bfloat16") if name in ("one rank", "DP2") else ("float32",):
        ranks(world_size, update_on_host, path, tmp_path / dtype, LAYOUTS[name], dtype)


# ---------------------------------------------------------------- checkpoints


def save_and_resume(path: Path, folder: Path, layout: dict[str, Any], dtype: str, first: int) -> None:
    """Steps, a checkpoint, more steps; a new strategy that loads it takes the same further steps, bit for bit. So it does with a copy in
    memory."""
    straight = begin(path, layout, dtype)
    steps(straight, range(first))
    torch.manual_seed(1234 + straight.layout.rank)
    straight.save_checkpoint(folder)
    copy = copied(straight)
    random_numbers = torch.rand(3)
    expected = steps(straight, range(first, first + 3))

    resumed = begin(path, layout, dtype)
    steps(resumed, range(7, 9))  # anything: loading must overwrite it
    resumed.load_checkpoint(folder)
    assert torch.equal(torch.rand(3), random_numbers), "every rank goes on with its own random numbers"
    rounding = 1e-4 if dtype == "float32" else 3e-2
    assert_repeats(steps(resumed, range(first, first + 3)), expected, rounding)
    same_weights(resumed, straight)

    for later in (resumed, begin(path, layout, dtype)):
        later.load_copy(copy)
        assert torch.equal(torch.rand(3), random_numbers)
        assert_repeats(steps(later, range(first, first + 3)), expected, rounding)
        same_weights(later, straight)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_is_bit_identical(ranks: RankPool, path: Path, tmp_path: Path, name: str) -> None:
    world_size = 1 if not LAYOUTS[name] else 2
    ranks(world_size, save_and_resume, path, tmp_path / "started", LAYOUTS[name], "float32", 2)
    ranks(world_size, save_and_resume, path, tmp_path / "unused", LAYOUTS[name], "float32", 0)
    ranks(world_size, save_and_resume, path, tmp_path / "bfloat16", LAYOUTS[name], "bfloat16", 2)


def tensors_to_write(path: Path) -> int:
    """Of the optimizer's state."""
    strategy = begin(path, {}, "bfloat16")
    state = _sharded_state(strategy._chunks, optimizer_of(strategy), loading=False).get("optimizer")
    return sum(isinstance(value, ShardedTensor) for value in nested_values(state or {}))


def test_one_of_two_copies_has_what_they_share_in_memory(ranks: RankPool, path: Path) -> None:
    first, second = ranks(2, tensors_to_write, path)
    assert first > 0 and second == 0


def resume_with_buckets(path: Path, folder: Path) -> None:
    """As larger models have them where gradients go out early."""
    with pytest.MonkeyPatch.context() as patch:
        small = partial(strategy_module.DistributedDataParallelConfig, bucket_size=20_000)
        patch.setattr(strategy_module, "DistributedDataParallelConfig", small)
        save_and_resume(path, folder, {"overlap_grad_reduce": True}, "bfloat16", 2)


def test_so_it_is_with_padding_between_buckets(ranks: RankPool, tmp_path: Path) -> None:
    """192 biases of query, key and value are no multiple of 128."""
    ranks(1, resume_with_buckets, tiny(tmp_path / "model", "qwen2", num_key_value_heads=1), tmp_path)


def resume_in_the_decay(path: Path, folder: Path) -> None:
    """Ten updates, of which the last four decay: checkpoints in the warm-up, before the decay and within it."""
    config = CONFIG.model_copy(update={"decay": "wsd", "decay_steps": 4, "decay_shape": "minus_sqrt", "warmup_steps": 2})
    for done in (1, 4, 8):
        straight, resumed = (started(path, config, total_updates=10) for _ in range(2))
        steps(straight, range(done))
        straight.save_checkpoint(folder / str(done))
        copy = copied(straight)
        expected = steps(straight, range(done, 10))
        resumed.load_checkpoint(folder / str(done))
        assert_repeats(steps(resumed, range(done, 10)), expected)
        assert expected[-1].lr == pytest.approx(1e-3 * (1 - 0.75**0.5))
        same_weights(resumed, straight)
        resumed.load_copy(copy)
        assert_repeats(steps(resumed, range(done, 10)), expected)
        assert optimizer_of(resumed).updates_made == optimizer_of(straight).updates_made == 10


def test_a_schedule_goes_on_where_it_was(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(1, resume_in_the_decay, path, tmp_path)


def save_after(path: Path, folder: Path, layout: dict[str, Any], count: int) -> tuple[dict[str, torch.Tensor], list[TrainResult]]:
    strategy = begin(path, layout)
    steps(strategy, range(count))
    strategy.save_checkpoint(folder)
    further = steps(strategy, range(count, count + 2))
    return own_weights(strategy), further


def save_beside_steps(path: Path, folder: Path, layout: dict[str, Any]) -> dict[str, FileRecord]:
    """Two updates go over the weights while they are written: what is in the files is what they were. Ranks but the first one see nothing
    of the folder yet, as through a network's file system."""
    strategy, resumed = begin(path, layout), begin(path, layout)
    steps(strategy, range(1))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() > 0:
            patch.setattr(Path, "rglob", lambda *_: iter(()))
        running = strategy.save_checkpoint(folder, asynchronous=True)
    expected = steps(strategy, range(1, 3))
    written = running.finish()
    assert running.is_done
    dist.barrier()
    resumed.load_checkpoint(folder)
    assert_repeats(steps(resumed, range(1, 3)), expected)
    same_weights(resumed, strategy)
    return written


def test_steps_go_on_while_a_checkpoint_is_written(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    parts = ranks(2, save_beside_steps, path, tmp_path, LAYOUTS["DP2"])
    written = [entry for part in parts for entry in part.items()]
    files = {str(path.relative_to(tmp_path)): record(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) == len(files) and dict(written) == files, "every file is told of by one rank, as it is"


NOTED_FLUSHES = """
import os
def noted(handle, flush=os.fsync):
    with open({log!r}, "a") as log:
        print(os.readlink(f"/proc/self/fd/{{handle}}"), os.fstat(handle).st_size, file=log)
    flush(handle)
os.fsync = noted
"""


def save_and_note_flushes(path: Path, folder: Path, asynchronous: bool) -> dict[str, FileRecord]:
    """Notes what is flushed, and with how many bytes, here and in the process that writes."""
    hooks = folder.parent / "hooks"
    hooks.mkdir(exist_ok=True)
    code = NOTED_FLUSHES.format(log=str(folder.parent / "flushed"))
    (hooks / "sitecustomize.py").write_text(code)
    real = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(hooks)
        exec(code, {})
        try:
            return begin(path, {}).save_checkpoint(folder, asynchronous).finish()
        finally:
            os.fsync = real


@pytest.mark.parametrize("asynchronous", [False, True], ids=["written at once", "written beside the steps"])
def test_every_file_of_a_checkpoint_is_on_the_disk(ranks: RankPool, path: Path, tmp_path: Path, asynchronous: bool) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (written,) = ranks(1, save_and_note_flushes, path, folder, asynchronous)
    flushed = (tmp_path / "flushed").read_text().splitlines()
    assert written and {f"{folder / name} {one.bytes}" for name, one in written.items()} <= set(flushed)


def save_where_nothing_can_be_written(path: Path, folder: Path) -> str:
    strategy = begin(path, {})
    running = strategy.save_checkpoint(folder, asynchronous=True)
    shutil.rmtree(folder)
    steps(strategy, range(1))
    with pytest.raises(RuntimeError) as error:
        running.finish()
    return str(error.value)


def kill_the_writer(path: Path, folder: Path) -> str:
    running = begin(path, {}).save_checkpoint(folder, asynchronous=True)
    assert isinstance(running, RunningSave)
    running._process.kill()
    with pytest.raises(RuntimeError) as error:
        running.finish()
    return str(error.value)


def test_what_could_not_be_written_is_told(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    for function, cause in ((save_where_nothing_can_be_written, "FileNotFoundError"), (kill_the_writer, "its process was killed")):
        folder = tmp_path / function.__name__
        folder.mkdir()
        (said,) = ranks(1, function, path, folder)
        assert said.startswith(f"the checkpoint in {folder / 'state'} was not written: ") and cause in said


def resume_all(
    path: Path, folders: list[Path], layout: dict[str, Any], count: int
) -> list[tuple[dict[str, torch.Tensor], list[TrainResult]]]:
    found = []
    for folder in folders:
        strategy = begin(path, layout)
        strategy.load_checkpoint(folder)
        further = steps(strategy, range(count, count + 2))
        found.append((own_weights(strategy), further))
    return found


STAGES = {"pipeline_parallel": 2}
FURTHER: dict[str, dict[str, Any]] = {
    "TP2 SP": {"tensor_parallel": 2, "sequence_parallel": True},
    "PP2": STAGES,
    "VPP2": {**STAGES, "virtual_pipeline_parallel": 2},
    "PP2 uneven": {**STAGES, "pipeline_layers": [0, 4]},
    "VPP2 uneven": {**STAGES, "virtual_pipeline_parallel": 2, "pipeline_layers": [0, 1, 3, 0]},
    "CP2": {"context_parallel": 2},
    "DP2 bf16": {"data": 2, "dtype": "bfloat16"},
    "DP2 replicated bf16": {"data": 2, "distributed_optimizer": False, "dtype": "bfloat16"},
}
WIDE: dict[str, dict[str, Any]] = {
    "TP2 DP2": {"data": 2, "tensor_parallel": 2},
    "PP2 DP2 replicated": {"data": 2, **STAGES, "distributed_optimizer": False},
    "VPP2 TP2 SP": {**STAGES, "virtual_pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "CP2 PP2": {"context_parallel": 2, **STAGES},
    "DP4": {"data": 4},
}
ALL = LAYOUTS | FURTHER | WIDE
LOADED_FROM = {
    "one rank": ["TP2", "VPP2", "VPP2 uneven", "CP2"],
    "DP2": ["one rank", "VPP2", "DP2 replicated"],
    "DP2 replicated": ["DP2", "CP2"],
    "TP2": ["one rank", "DP2 replicated"],
    "TP2 SP": ["PP2", "DP2"],
    "PP2": ["TP2 SP", "VPP2"],
    "VPP2": ["PP2", "TP2"],
    "PP2 uneven": ["VPP2 uneven", "PP2"],
    "VPP2 uneven": ["one rank", "PP2 uneven"],
    "CP2": ["DP2", "VPP2"],
    "DP2 bf16": ["DP2 replicated bf16"],
    "DP2 replicated bf16": ["DP2 bf16"],
}


def processes(layout: dict[str, Any]) -> int:
    sizes = (layout.get(name, 1) for name in ("data", "tensor_parallel", "pipeline_parallel", "context_parallel"))
    return math.prod(sizes)


class Saved:
    """Checkpoints by layout, each written once, with the two steps that followed."""

    def __init__(self, ranks: RankPool, folder: Path, path: Path, layouts: dict[str, dict[str, Any]]) -> None:
        self._ranks, self.folder, self.path, self.layouts = ranks, folder, path, layouts
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            layout = self.layouts[name]
            self._known[name] = self._ranks(processes(layout), save_after, self.path, self.folder / name, layout, 3)
        return self._known[name]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a model whose tensors do not fill what Megatron aligns them to: there is padding between them and the tied embeddings."""
    folder = tmp_path_factory.mktemp("saved")
    shape = {"hidden": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "layers": 4}
    return Saved(ranks, folder, tiny(folder / "model", "qwen3", **shape), ALL)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loaded", LOADED_FROM)
def test_another_layout_goes_on_where_the_first_stopped(ranks: RankPool, saved: Saved, loaded: str) -> None:
    goes_on(ranks, saved, LOADED_FROM[loaded], loaded)


@pytest.mark.nightly
@pytest.mark.parametrize("loaded", [name for name in ALL if "bf16" not in name])
def test_every_layout_goes_on_where_any_other_stopped(ranks: RankPool, saved: Saved, loaded: str) -> None:
    goes_on(ranks, saved, [name for name in ALL if "bf16" not in name and name not in (loaded, *LOADED_FROM.get(loaded, ()))], loaded)


def save_again(path: Path, source: Path, target: Path, layout: dict[str, Any]) -> list[TrainResult]:
    strategy = begin(path, layout)
    strategy.load_checkpoint(source)
    strategy.save_checkpoint(target)
    return steps(strategy, range(3, 5))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """As torch reads them, without a layout. Float32 weights have two names."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without process groups
        _load_state_dict(found, FileSystemReader(folder / STATE_FOLDER), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name.replace(".fp32_param.", ".param."): value for name, value in found.items() if isinstance(value, torch.Tensor)}


def check_bfloat16(ranks: RankPool, path: Path, folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Weights, float32 weights and moments are the same bits under both layouts; losses and gradients about the same."""
    before, after = ({**layout, "dtype": "bfloat16"} for layout in (before, after))
    _, expected = ranks(processes(before), save_after, path, folder / "before", before, 3)[0]
    found = ranks(processes(after), save_again, path, folder / "before", folder / "after", after)[0]
    mine, other = stored_tensors(folder / "after"), stored_tensors(folder / "before")
    assert mine.keys() == other.keys()
    assert {"bfloat16", "float32"} == {str(tensor.dtype).removeprefix("torch.") for tensor in mine.values()}
    moved = [
        name for name in mine if not torch.equal(*(tensors[name][: min(len(mine[name]), len(other[name]))] for tensors in (mine, other)))
    ]
    assert not moved
    for result, straight in zip(found, expected, strict=True):
        assert (result.loss, result.grad_norm) == pytest.approx((straight.loss, straight.grad_norm), rel=3e-2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("TP2", "DP2"),
        *(
            pytest.param(*pair, marks=(pytest.mark.slow, pytest.mark.nightly))
            for pair in (
                ("TP2 SP", "one rank"),
                ("DP2", "PP2"),
                ("VPP2", "one rank"),
                ("VPP2", "DP2 replicated"),
                ("DP2 replicated", "DP2"),
                ("DP2", "DP2 replicated"),
                ("PP2 DP2 replicated", "TP2 DP2"),
                ("DP4", "CP2"),
            )
        ),
    ],
)
def test_bfloat16_goes_on_with_the_same_bits(ranks: RankPool, saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    check_bfloat16(ranks, saved.path, tmp_path, ALL[before], ALL[after])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_critic_goes_on_under_other_layouts(ranks: RankPool, tmp_path: Path) -> None:
    layouts = {name: layout | {"value_init": "actor"} for name, layout in (LAYOUTS | FURTHER).items() if "bf16" not in name}
    saved = Saved(ranks, tmp_path / "saved", tiny(tmp_path / "model", "llama", vocab_size=101, layers=4), layouts)
    for loaded in layouts:
        goes_on(ranks, saved, LOADED_FROM[loaded], loaded)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("keys", [1, 2])
def test_ranks_that_have_a_key_together_go_on_and_are_gone_on_from(ranks: RankPool, tmp_path: Path, keys: int) -> None:
    """Two of them have one of the model's key/value heads."""
    together = {"tensor_parallel": 2 * keys}
    layouts = {"one rank": {}, "together": together, "together SP": {**together, "sequence_parallel": True}, "PP2": STAGES}
    saved = Saved(ranks, tmp_path / "saved", tiny(tmp_path / "model", "qwen2", num_key_value_heads=keys), layouts)
    for loaded, sources in {"one rank": ["together"], "together": ["one rank", "PP2"], "PP2": ["together SP"]}.items():
        goes_on(ranks, saved, sources, loaded)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=(pytest.mark.slow, pytest.mark.nightly))])
def test_adapters_go_on_where_parts_have_no_layers(ranks: RankPool, saved: Saved, tmp_path: Path, family: str) -> None:
    """Embeddings alone, a head alone: such a part has no adapters; a stage may have none at all. Llama's embeddings are not tied."""
    lora = LoraConfig(rank=2, targets=["q_proj", "down_proj"])
    layouts = {name: ALL[name] | {"lora": lora} for name in ("one rank", "PP2 uneven", "VPP2 uneven", "TP2")}
    path = saved.path if family == "qwen3" else tiny(tmp_path / "model", family, vocab_size=101, layers=4)
    adapters = Saved(ranks, tmp_path, path, layouts)
    goes_on(ranks, adapters, ["one rank", "PP2 uneven"], "VPP2 uneven")
    goes_on(ranks, adapters, ["VPP2 uneven"], "TP2")
    for name in ("one rank", "PP2 uneven", "VPP2 uneven"):
        assert all("lora_" in tensor for tensor in FileSystemReader(tmp_path / name / STATE_FOLDER).read_metadata().state_dict_metadata)


def goes_on(ranks: RankPool, saved: Saved, sources: list[str], loaded: str) -> None:
    """Whatever rank a tensor is exported by."""
    before = [saved[source] for source in sources]
    folders = [saved.folder / source for source in sources]
    after = ranks(processes(saved.layouts[loaded]), resume_all, saved.path, folders, saved.layouts[loaded], 3)
    for number, source in enumerate(sources):
        expected = {name: one for own, _ in before[number] for name, one in own.items()}
        weights = {name: one for of_rank in after for name, one in of_rank[number][0].items()}
        assert weights.keys() == expected.keys()
        for result, other in zip(after[0][number][1], before[number][0][1], strict=True):
            assert result.lr == other.lr
            assert result.loss == pytest.approx(other.loss, rel=1e-5), f"{source} to {loaded}"
            assert result.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5)  # two steps of 1e-3


def critic_checkpoint(path: Path, folder: Path) -> None:
    straight = started(path, CONFIG, total_updates=20, value_init="actor", tensor_parallel=2)
    batch = batch_of()
    train_step(straight, batch, weighted_loss, ["values"], 3)
    straight.save_checkpoint(folder)
    copy = copied(straight)
    expected = train_step(straight, batch, weighted_loss, ["values"], 3)
    resumed = started(path, CONFIG, total_updates=20, value_init="actor", tensor_parallel=2)
    resumed.load_checkpoint(folder)
    assert_repeats([train_step(resumed, batch, weighted_loss, ["values"], 3)], [expected])
    resumed.load_copy(copy)
    assert_repeats([train_step(resumed, batch, weighted_loss, ["values"], 3)], [expected])


def adapters_checkpoint(path: Path, folder: Path) -> None:
    """They train beside frozen layers, of which neither gradients nor moments are stored, and which leave the device without a copy."""
    lora = LoraConfig(rank=2, targets=["q_proj", "down_proj"])
    straight, resumed = (started(path, CONFIG, total_updates=20, tensor_parallel=2, lora=lora) for _ in range(2))
    steps(straight, range(2))
    straight.save_checkpoint(folder)
    first = straight.offload(StateGroup)["out"]
    straight.load(StateGroup)
    copy = copied(straight)
    expected = steps(straight, range(2, 3))
    adapters = sum(p.numel() for p in parameters_of(straight) if p.requires_grad)
    again = straight.offload(StateGroup)["out"]
    straight.load(StateGroup)
    assert first > 4 * 80_000 > 4 * 20_000 > again > 3 * 4 * adapters
    assert sum(array.nbytes for array in copy[0]) < 4 * 20_000, "frozen weights are not copied"
    resumed.load_checkpoint(folder)
    assert_repeats(steps(resumed, range(2, 3)), expected)
    same_weights(resumed, straight)
    resumed.offload(StateGroup)
    resumed.load(StateGroup)
    resumed.load_copy(copy)
    resumed.offload(StateGroup)
    resumed.load(StateGroup)
    assert_repeats(steps(resumed, range(2, 3)), expected)  # its host copies are not the ones from before


def test_adapters_resume_too(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(2, adapters_checkpoint, path, tmp_path)


def test_a_critic_resumes_too(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(2, critic_checkpoint, path, tmp_path)


def refused(path: Path, folder: Path, layout: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        begin(path, layout).load_checkpoint(folder)
    return str(error.value)


def warnings_of_a_save(path: Path, layout: dict[str, Any], folder: Path) -> list[str]:
    """What Megatron's checks say of a checkpoint while it is written."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.dist_checkpointing")
    logger.addHandler(listener)
    try:
        strategy = begin(path, layout)
        steps(strategy, range(1))
        strategy.save_checkpoint(folder)
        if strategy.layout.rank == 1:
            optimizer_of(strategy).scheduler.num_steps += 1
        strategy.save_checkpoint(folder.with_name("differs"))
    finally:
        logger.removeHandler(listener)
    return said


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one rank"])
def test_a_checkpoint_is_written_without_a_warning_that_means_nothing(ranks: RankPool, path: Path, tmp_path: Path, layout: str) -> None:
    """Ranks hold different parts of the optimizer. A schedule that differs is still told."""
    first, second = ranks(2, warnings_of_a_save, path, LAYOUTS[layout], tmp_path / "checkpoint")
    assert first == []
    [told] = second
    assert "common state dict differs" in told and "'schedule'" in told and "'optimizer'" not in told


def test_an_incomplete_checkpoint_is_refused(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    expected = f"checkpoint.resume: {tmp_path / 'state'} cannot be read (ValueError: it is none of this strategy, or not a complete one)"
    assert ranks(1, refused, path, tmp_path, {})[0].startswith(expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("how", ["cut", "empty"])
def test_a_damaged_file_is_told_as_such(ranks: RankPool, path: Path, tmp_path: Path, name: str, how: str) -> None:
    ranks(1, save_after, path, tmp_path, {}, 0)
    file = tmp_path / "state" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if how == "cut" else b"")
    said = ranks(1, refused, path, tmp_path, {})[0]
    assert said.startswith(f"checkpoint.resume: {tmp_path / 'state'} cannot be read (") and "go on from an earlier checkpoint" in said
    assert "Traceback" not in said and "dict_keys" not in said


OTHER_MODELS = {
    "another vocabulary": ({"vocab_size": 151}, {}, "vocab_size is 101 there, 151 here"),
    "more layers": ({"layers": 4}, {}, "layers is 2 there, 4 here"),
    "another family": ({"family": "qwen2"}, {}, "family is qwen3 there, qwen2 here; qkv_bias is False there, True here"),
    "another precision": ({}, {"dtype": "bfloat16"}, "model.dtype is float32 there, bfloat16 here"),
    "a critic": ({}, {"value_init": "actor"}, "outputs is tokens there, values here"),
}


def test_another_model_is_refused_and_told_apart(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(1, save_after, path, tmp_path / "saved", {}, 0)
    for name, (changes, options, difference) in OTHER_MODELS.items():
        other = tiny(tmp_path / name, **{"family": "qwen3", "vocab_size": 101, **changes}) if changes else path
        said = ranks(1, refused, other, tmp_path / "saved", options)[0]
        assert said.startswith(f"checkpoint.resume: {tmp_path / 'saved'} holds another model: {difference}"), name


def missing_rank_file(path: Path, folder: Path) -> str:
    strategy = begin(path, {"data": 2})
    strategy.save_checkpoint(folder)
    (folder / "rank_00001.pt").unlink(missing_ok=True)
    torch.distributed.barrier()
    try:
        strategy.load_checkpoint(folder)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_the_random_numbers_of_a_rank_may_not_be_missing(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    first, second = ranks(2, missing_rank_file, path, tmp_path)
    assert first == "loaded" and second.startswith(f"checkpoint.resume: {tmp_path / 'rank_00001.pt'} is missing")
