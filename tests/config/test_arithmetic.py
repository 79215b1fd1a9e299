"""Batch arithmetic against numbers worked out by hand."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch
from config_project import Project
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from roll_lite.config.arithmetic import (
    DomainArithmetic,
    PassArithmetic,
    _fullest_rank,
    _largest_batch,
    _with_minima,
    derive,
    device_numbers,
    held_out_sampling,
    layers_per_chunk,
    longest_sequence,
    max_model_len,
)
from roll_lite.config.arithmetic_tables import render
from roll_lite.config.schema.models import MegatronStrategyConfig
from roll_lite.data.microbatch import MicroBatchPlan, TokenBudget
from roll_lite.data.minibatches import balanced_partition
from roll_lite.scheduler.mix import BatchPlan


def test_devices() -> None:
    assert device_numbers(2) == (0, 1)
    assert device_numbers([2, 3]) == (2, 3)


def test_a_run_worked_out_by_hand(project: Project) -> None:
    """12 prompts, shares 1:2, groups of 4 and 8 -> 4 x 4 + 8 x 8 = 80 samples; 2 mini-batches of 40; 6 updates.

    Actor: 8 devices / (TP 2 x PP 2) = 2 copies -> 40 samples each, 4 micro-batches of 12 (48 >= 40) with at most 12 x 48 tokens; 79 where
    the other has one. 20 of a mini-batch in 3 of 8, at most 39. Reference: 4 copies -> 20 samples, at most 77; 200 tokens are 4 of 48.
    Critic: 3 copies -> 27 samples (80 / 3 rounded up), at most 78, whose 3,744 tokens fit a micro-batch; 14 of a mini-batch, at most 38,
    each alone, because it is longer than the budget of 40.
    """
    yaml = """
rollout: {prompts_per_step: 12}
domains: {add: {share: 0.1}, copy: {share: 0.2, samples_per_prompt: 8}}
actor_train: {devices: 8, strategy: {tensor_parallel: 2, pipeline_parallel: 2}, micro_batch_size: 12, train_micro_batch_size: 8}
actor_infer: {devices: [6, 7, 8, 9], strategy: {tensor_parallel: 2}}
reference: {devices: [0, 1, 2, 3], micro_batch_tokens: 200}
critic: {devices: [10, 11, 12], train_micro_batch_tokens: 40}
algorithm: {advantage: {name: gae}, kl_in_reward: {coef: 0.1}, ppo_epochs: 3, mini_batches: 2}
"""
    project.write("configs/worked.yaml", f"defaults: [run, _self_]\n{yaml}")
    arithmetic = derive(project.load(name="worked"))
    add, copy = arithmetic.domains
    assert (add.share, add.prompts_per_step, add.samples_per_step, add.max_tokens) == (Fraction(1, 3), 4, 16, 48)
    assert (copy.share, copy.prompts_per_step, copy.samples_per_step, copy.max_tokens) == (Fraction(2, 3), 8, 64, 40)
    assert (arithmetic.samples_per_step, arithmetic.mini_batch_samples) == (80, 40)
    assert "6 (ppo_epochs 3 x mini_batches 2)" in render(arithmetic)
    assert (arithmetic.max_model_len, arithmetic.engine_replicas, arithmetic.device_count) == (48, 2, 13)
    assert {role: (one.copies, one.shares_with) for role, one in arithmetic.clusters.items()} == {
        "actor_train": (2, ("actor_infer", "reference")),
        "actor_infer": (2, ("actor_train",)),
        "reference": (4, ("actor_train",)),
        "critic": (3, ()),
    }
    counts = {(one.role, one.what): (one.rows, one.most_rows, one.micro_batches, one.tokens) for one in arithmetic.passes}
    assert counts == {
        ("actor_train", "forward"): (40, 79, 4, 576),
        ("actor_train", "training"): (20, 39, 3, 384),
        ("reference", "forward"): (20, 77, 5, 200),
        ("critic", "forward"): (27, 78, 1, 3744),
        ("critic", "training"): (14, 38, 14, 48),
    }


def test_the_first_parts_of_a_pipeline_have_a_layer_more_where_they_do_not_divide() -> None:
    for stages, virtual, layers, expected in ((1, 1, 7, [7]), (2, 1, 7, [4, 3]), (4, 1, 6, [2, 2, 1, 1]), (2, 2, 7, [2, 2, 2, 1])):
        assert layers_per_chunk(MegatronStrategyConfig(pipeline_parallel=stages, virtual_pipeline_parallel=virtual), layers) == expected
    assert layers_per_chunk(MegatronStrategyConfig(pipeline_parallel=2, pipeline_layers=[5, 2]), 7) == [5, 2]


def test_micro_batches_are_a_multiple_of_what_sequence_parallelism_cuts(project: Project) -> None:
    """48 tokens over three ranks stay 48, over five they become 50; without sequence parallelism nothing is rounded."""
    for parts, cut, tokens in ((3, True, 48), (5, True, 50), (5, False, 48)):
        strategy = MegatronStrategyConfig(tensor_parallel=parts, sequence_parallel=cut)
        config = project.load()
        role = config.actor_train.model_copy(update={"strategy": strategy, "devices": parts, "micro_batch_size": 1})
        assert derive(config.model_copy(update={"actor_train": role})).passes[0].tokens == tokens


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(10, 200), st.none() | st.integers(1, 9))
def test_the_bounds_hold_for_what_is_done(lengths: list[int], ranks: int, budget: int, limit: int | None) -> None:
    """Against balancing and planning themselves."""

    def planned(lengths: list[int]) -> tuple[int, int, int]:
        shares = [torch.tensor([lengths[row] for row in part], dtype=torch.int64) for part in balanced_partition(lengths, ranks)]
        plans = [MicroBatchPlan.of(share, TokenBudget(budget, limit)) for share in shares]
        tokens = [int(share[part].sum()) for share, plan in zip(shares, plans, strict=True) for part in plan.parts]
        return max(map(len, shares)), max(plan.count for plan in plans), max(tokens)

    rows, most_rows = _fullest_rank(len(lengths), ranks)
    told = PassArithmetic("actor_train", "forward", rows, most_rows, 30, budget, limit)
    assert planned([30] * len(lengths))[:2] == (told.rows, told.micro_batches)
    found_rows, _, found_tokens = planned(lengths)
    assert found_rows <= told.most_rows and found_tokens <= told.tokens
    one_long_row_for_each_other_rank = [1] * (len(lengths) - ranks + 1) + [1000] * (ranks - 1)
    if len(lengths) >= ranks:
        assert planned(one_long_row_for_each_other_rank)[0] == told.most_rows


def test_quotas_that_are_no_whole_numbers(project: Project) -> None:
    arithmetic = derive(project.load("rollout.prompts_per_step=7"))
    assert [one.prompts_per_step for one in arithmetic.domains] == [Fraction(7, 2), Fraction(7, 2)]
    assert arithmetic.samples_per_step == 28
    assert "3.50 on average" in render(arithmetic)
    with_minimum = derive(project.load("rollout.prompts_per_step=7", "domains.add.min_prompts=6"))
    assert [one.prompts_per_step for one in with_minimum.domains] == [6, 1]


def test_passes_are_those_of_the_largest_batch(project: Project) -> None:
    """7 prompts, 3.5 for each domain. Groups of 4 make 28 samples however they fall; with groups of 8, 5 of them are the most."""
    alike = derive(project.load("rollout.prompts_per_step=7"))
    assert alike.passes[0].rows == 28
    project.write("configs/groups.yaml", "defaults: [run, _self_]\ndomains: {copy: {samples_per_prompt: 8}}\n")
    differing = derive(project.load("rollout.prompts_per_step=7", name="groups"))
    assert (differing.samples_per_step, differing.passes[0].rows) == (42, 2 * 4 + 5 * 8)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 8)), min_size=1, max_size=4), st.integers(1, 12))
def test_no_batch_is_larger(domains: list[tuple[int, int, int]], prompts: int) -> None:
    """Against the plan that decides."""
    total, least = sum(share for share, _, _ in domains), {str(i): least for i, (_, least, _) in enumerate(domains)}
    assume(sum(least.values()) <= prompts)
    told = [DomainArithmetic(str(i), Fraction(s, total), Fraction(prompts * s, total), m, n, 9) for i, (s, m, n) in enumerate(domains)]
    plan = BatchPlan({one.name: float(domains[int(one.name)][0]) for one in told}, least)
    plan.size = prompts
    for _ in range(20):
        quota = plan.next_quota()
        assert all(quota[name] >= count for name, count in least.items())
        assert sum(quota[one.name] * one.samples_per_prompt for one in told) <= _largest_batch(told)


@pytest.mark.parametrize(
    ("shares", "least", "prompts"),
    [
        ([98, 1, 1], [0, 8, 0], [23.68, 8, 0.32]),
        ([1, 1, 1], [0, 16, 0], [8, 16, 8]),
        ([3, 2, 1, 2], [0, 0, 20, 6], [2, 2, 20, 8]),
        ([1, 1], [16, 16], [16, 16]),
        ([3, 1], [5, 5], [24, 8]),
    ],
)
def test_averages_count_minima(shares: list[int], least: list[int], prompts: list[float]) -> None:
    names = [str(number) for number in range(len(shares))]
    minima = dict(zip(names, least, strict=True))
    averages = _with_minima({name: Fraction(32 * share, sum(shares)) for name, share in zip(names, shares, strict=True)}, minima)
    assert sum(averages.values()) == 32 and [float(averages[name]) for name in names] == pytest.approx(prompts)
    plan = BatchPlan(dict(zip(names, map(float, shares), strict=True)), minima)
    plan.size = 32
    planned = Counter[str]()
    for _ in range(100):
        planned.update(plan.next_quota())
    assert [planned[name] / 100 for name in names] == pytest.approx(prompts, abs=0.1), "what the run does"


def test_an_engine_may_be_told_a_longer_sequence(project: Project) -> None:
    assert derive(project.load("actor_infer.strategy.max_model_len=60")).max_model_len == 60


def test_the_table(project: Project) -> None:
    project.write("configs/table.yaml", "defaults: [run, _self_]\nactor_train: {devices: 3}\nactor_infer: {devices: [0, 1, 4]}\n")
    text = render(derive(project.load("algorithm.mini_batches=4", name="table")))
    rows = [line.split() for line in text.splitlines()]
    assert ["actor_train", "0-2", "megatron:", "DP", "3", "actor_infer"] in rows
    assert ["actor_infer", "0-1,", "4", "vllm:", "3", "replicas", "actor_train"] in rows
    assert ["add", "50.0%", "4", "4", "16", "48"] in rows
    assert ["updates", "per", "step", "4", "(ppo_epochs", "1", "x", "mini_batches", "4)"] in rows
    assert ["actor_train", "forward", "11", "1", "1440", "tokens"] in rows
    assert ["actor_train", "training", "3", "1", "288", "tokens"] in rows


def test_engines_have_room_for_held_out_responses(project: Project) -> None:
    shortest = project.load()
    longest = max(domain.sampling.max_prompt_tokens + domain.sampling.max_tokens for domain in shortest.domains.values())
    held_out = project.load("validation.sampling={max_tokens: 31, top_p: 0.9}", "domains.add.sampling.top_k=7")
    assert held_out.domains["add"].data.validation is not None and held_out.domains["copy"].data.validation is None
    assert max_model_len(held_out) == held_out.domains["add"].sampling.max_prompt_tokens + 31 > longest
    assert longest_sequence(held_out) == longest, "of training"
    sampling = held_out_sampling(held_out, held_out.domains["add"])
    assert (sampling.max_tokens, sampling.top_p, sampling.top_k, sampling.temperature) == (31, 0.9, 7, 1.0)
    assert max_model_len(project.load("validation={enabled: false, sampling: {max_tokens: 31}}")) == longest
    given = project.problems("validation.sampling.max_tokens=31", "actor_infer.strategy.max_model_len=50")
    assert [problem.path for problem in given] == ["actor_infer.strategy.max_model_len"]
    assert "(validation.sampling.max_tokens)" in given[0].message


def test_a_domain_may_have_its_own_held_out_sampling(project: Project) -> None:
    """It comes before that of all domains, which comes before that of training."""
    config = project.load(
        "validation.sampling={temperature: 0.6, top_p: 0.9, max_tokens: 20}",
        "domains.add.sampling={top_k: 7, top_p: 0.8}",
        "domains.add.validation_sampling={temperature: 0, max_tokens: 31}",
    )
    own = held_out_sampling(config, config.domains["add"])
    assert (own.temperature, own.top_p, own.top_k, own.max_tokens) == (0.0, 0.9, 7, 31)
    other = held_out_sampling(config, config.domains["copy"])
    assert (other.temperature, other.top_p, other.top_k, other.max_tokens) == (0.6, 0.9, 0, 20)
    assert max_model_len(config) == config.domains["add"].sampling.max_prompt_tokens + 31
    given = project.problems("domains.add.validation_sampling.max_tokens=31", "actor_infer.strategy.max_model_len=50")
    assert [problem.path for problem in given] == ["actor_infer.strategy.max_model_len"]
    assert "(domains.add.validation_sampling.max_tokens)" in given[0].message
