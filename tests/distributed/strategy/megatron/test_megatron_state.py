"""State that leaves and comes back: offloading frees storages and changes no bit; checkpoints resume, also under another layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import batch_of, own_weights, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from support_passes import forward, train_step

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.distributed.strategy.base import StateGroup, TrainResult
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

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
    return started(path, CONFIG, dtype, total_updates=20, **{name: value for name, value in layout.items() if name != "data"})


def steps(strategy: MegatronStrategy, numbers: range) -> list[TrainResult]:
    results = []
    for number in numbers:
        batch = shard(batch_of(seed=number), strategy, [5, 1] if strategy.layout.data_size == 2 else None)
        results.append(train_step(strategy, batch, weighted_loss, ["log_probs", "entropy"], 3))
    return results


def same_weights(ours: MegatronStrategy, theirs: MegatronStrategy) -> None:
    expected = own_weights(theirs)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own_weights(ours).items())


# ---------------------------------------------------------------- offloading


def parameters_bytes(strategy: MegatronStrategy) -> int:
    return sum(storage.nbytes() for storage in {p.untyped_storage()._cdata: p.untyped_storage() for p in _parameters(strategy)}.values())


def _parameters(strategy: MegatronStrategy) -> list[torch.nn.Parameter]:
    return [parameter for chunk in strategy._chunks for parameter in chunk.parameters()]


def offload_and_go_on(path: Path, layout: dict[str, Any], dtype: str) -> None:
    strategy, undisturbed = begin(path, layout, dtype), begin(path, layout, dtype)
    numel = sum(parameter.numel() for parameter in _parameters(strategy))
    width = 4 if dtype == "float32" else 2
    shards = 2 if layout.get("data") and layout.get("distributed_optimizer", True) else 1
    moments = 2 * 4 * numel / shards
    main_weights = 0 if dtype == "float32" else 4 * numel / shards
    expected = {StateGroup.WEIGHTS: width * numel, StateGroup.GRADIENTS: 4 * numel, StateGroup.OPTIMIZER: moments + main_weights}
    storages = {group: strategy._mover._storages(group) for group in StateGroup}

    for number, groups in enumerate(([], [StateGroup.OPTIMIZER], [StateGroup.WEIGHTS, StateGroup.GRADIENTS], list(StateGroup))):
        strategy.offload(groups)
        strategy.offload(groups)  # a second time changes nothing
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
        strategy.load(groups)
        strategy.load(groups)
        assert steps(strategy, range(number, number + 1)) == steps(undisturbed, range(number, number + 1))
    same_weights(strategy, undisturbed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_offloading_frees_memory_and_changes_no_bit(ranks: RankPool, path: Path, name: str) -> None:
    world_size = 1 if not LAYOUTS[name] else 2
    for dtype in ("float32", "bfloat16") if name in ("one rank", "DP2") else ("float32",):
        ranks(world_size, offload_and_go_on, path, LAYOUTS[name], dtype)


def offload_a_reference(path: Path) -> None:
    strategy = started(path)
    assert not any(parameter.requires_grad for parameter in _parameters(strategy))
    before = forward(strategy, batch_of(), ["log_probs"], 2)
    strategy.offload(StateGroup)
    assert parameters_bytes(strategy) == 0
    strategy.load(StateGroup)
    after = forward(strategy, batch_of(), ["log_probs"], 2)
    assert before is not None
    assert after is not None
    assert torch.equal(before.ragged("log_probs").values, after.ragged("log_probs").values)
    with pytest.raises(AssertionError, match="without an optimizer"):
        train_step(strategy, batch_of(), weighted_loss, ["log_probs"], 2)


def test_a_forward_only_role_has_weights_to_move_and_nothing_else(ranks: RankPool, path: Path) -> None:
    ranks(1, offload_a_reference, path)


# ---------------------------------------------------------------- checkpoints


def save_and_resume(path: Path, folder: Path, layout: dict[str, Any], dtype: str, first: int) -> None:
    """Steps, a checkpoint, more steps; a new strategy that loads it takes the same further steps, bit for bit."""
    straight = begin(path, layout, dtype)
    steps(straight, range(first))
    torch.manual_seed(1234 + straight.layout.rank)
    straight.save_checkpoint(folder)
    random_numbers = torch.rand(3)
    expected = steps(straight, range(first, first + 3))

    resumed = begin(path, layout, dtype)
    steps(resumed, range(7, 9))  # anything: loading must overwrite it
    resumed.load_checkpoint(folder)
    assert torch.equal(torch.rand(3), random_numbers), "every rank goes on with its own random numbers"
    assert steps(resumed, range(first, first + 3)) == expected
    same_weights(resumed, straight)


@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_is_bit_identical(ranks: RankPool, path: Path, tmp_path: Path, name: str) -> None:
    world_size = 1 if not LAYOUTS[name] else 2
    ranks(world_size, save_and_resume, path, tmp_path / "started", LAYOUTS[name], "float32", 2)
    ranks(world_size, save_and_resume, path, tmp_path / "unused", LAYOUTS[name], "float32", 0)
    ranks(world_size, save_and_resume, path, tmp_path / "bfloat16", LAYOUTS[name], "bfloat16", 2)


def resume_in_the_decay(path: Path, folder: Path) -> None:
    """Ten updates, of which the last four decay: checkpoints in the warm-up, before the decay and within it."""
    config = CONFIG.model_copy(update={"decay": "wsd", "decay_steps": 4, "decay_shape": "minus_sqrt", "warmup_steps": 2})
    for done in (1, 4, 8):
        straight, resumed = (started(path, config, total_updates=10) for _ in range(2))
        steps(straight, range(done))
        straight.save_checkpoint(folder / str(done))
        expected = steps(straight, range(done, 10))
        resumed.load_checkpoint(folder / str(done))
        assert steps(resumed, range(done, 10)) == expected
        assert expected[-1].lr == pytest.approx(1e-3 * (1 - 0.75**0.5))
        same_weights(resumed, straight)


def test_a_schedule_goes_on_where_it_was(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(1, resume_in_the_decay, path, tmp_path)


def save_after(path: Path, folder: Path, layout: dict[str, Any], count: int) -> tuple[dict[str, torch.Tensor], list[TrainResult]]:
    strategy = begin(path, layout)
    steps(strategy, range(count))
    strategy.save_checkpoint(folder)
    further = steps(strategy, range(count, count + 2))
    return own_weights(strategy), further


def resume_elsewhere(path: Path, folder: Path, layout: dict[str, Any], count: int) -> tuple[dict[str, torch.Tensor], list[TrainResult]]:
    strategy = begin(path, layout)
    strategy.load_checkpoint(folder)
    further = steps(strategy, range(count, count + 2))
    return own_weights(strategy), further


@pytest.mark.parametrize(
    ("saved", "loaded"), [("TP2", "one rank"), ("one rank", "TP2"), ("DP2", "one rank"), ("one rank", "DP2"), ("DP2", "TP2")]
)
def test_another_layout_goes_on_where_the_first_stopped(ranks: RankPool, path: Path, tmp_path: Path, saved: str, loaded: str) -> None:
    goes_on(ranks, path, tmp_path, LAYOUTS[saved], LAYOUTS[loaded])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("VPP2", "one rank"),
        ("one rank", "VPP2"),
        ("TP2", "VPP2"),
        ("VPP2", "PP2"),
        ("PP2", "DP2"),
        ("DP2", "PP2"),
        ("CP2", "TP2"),
        ("one rank", "CP2"),
    ],
)
def test_further_layouts_go_on_where_others_stopped(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, saved: str, loaded: str
) -> None:
    stages = {"PP2": {"pipeline_parallel": 2}, "VPP2": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}}
    layouts: dict[str, dict[str, Any]] = LAYOUTS | stages | {"CP2": {"context_parallel": 2}}
    deep = tiny(tmp_path_factory.mktemp("deep") / "model", "qwen3", vocab_size=101, layers=4)
    goes_on(ranks, deep, tmp_path, layouts[saved], layouts[loaded])


def goes_on(ranks: RankPool, path: Path, folder: Path, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Whatever rank a tensor is exported by."""
    before = ranks(2 if saved else 1, save_after, path, folder, saved, 3)
    after = ranks(2 if loaded else 1, resume_elsewhere, path, folder, loaded, 3)
    expected, weights = ({name: one for own, _ in found for name, one in own.items()} for found in (before, after))
    further, results = before[0][1], after[0][1]
    assert weights.keys() == expected.keys()
    for result, other in zip(results, further, strict=True):
        assert result.lr == other.lr
        assert result.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5)  # two steps of 1e-3


def critic_checkpoint(path: Path, folder: Path) -> None:
    straight = started(path, CONFIG, total_updates=20, value_init="actor", tensor_parallel=2)
    batch = batch_of()
    train_step(straight, batch, weighted_loss, ["values"], 3)
    straight.save_checkpoint(folder)
    expected = train_step(straight, batch, weighted_loss, ["values"], 3)
    resumed = started(path, CONFIG, total_updates=20, value_init="actor", tensor_parallel=2)
    resumed.load_checkpoint(folder)
    assert train_step(resumed, batch, weighted_loss, ["values"], 3) == expected


def test_a_critic_resumes_too(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(2, critic_checkpoint, path, tmp_path)


def refused(path: Path, folder: Path, layout: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        begin(path, layout).load_checkpoint(folder)
    return str(error.value)


def test_an_incomplete_checkpoint_is_refused(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    expected = f"checkpoint.resume: {tmp_path / 'state'} cannot be read (ValueError: it is none of this strategy, or not a complete one)"
    assert ranks(1, refused, path, tmp_path, {})[0].startswith(expected)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("how", ["cut", "empty"])
def test_a_damaged_file_is_told_as_such(ranks: RankPool, path: Path, tmp_path: Path, name: str, how: str) -> None:
    ranks(1, save_after, path, tmp_path, {}, 0)
    file = tmp_path / "state" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if how == "cut" else b"")
    said = ranks(1, refused, path, tmp_path, {})[0]
    assert said.startswith(f"checkpoint.resume: {tmp_path / 'state'} cannot be read (") and "go on from an earlier checkpoint" in said
    assert "Traceback" not in said and "dict_keys" not in said


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
