"""Batch arithmetic against numbers worked out by hand."""

from __future__ import annotations

from fractions import Fraction

from config_project import Project

from roll_lite.config.arithmetic import derive, device_numbers, render


def test_devices() -> None:
    assert device_numbers(2) == (0, 1)
    assert device_numbers([2, 3]) == (2, 3)


def test_a_run_worked_out_by_hand(project: Project) -> None:
    """12 prompts, shares 1:2, groups of 4 and 8 -> 4 x 4 + 8 x 8 = 80 samples; 2 mini-batches of 40; 6 updates.

    Actor: 8 devices / (TP 2 x PP 2) = 2 copies -> 40 samples each, 4 forward passes of 12 (48 >= 40), 20 of a mini-batch in 3 passes of 8.
    Reference: 4 copies -> 20 samples, 3 passes of 8. Critic: 3 copies -> 27 samples (80 / 3 rounded up), 14 of a mini-batch, 2 passes of 8.
    """
    yaml = """
rollout: {prompts_per_step: 12}
domains: {add: {share: 0.1}, copy: {share: 0.2, samples_per_prompt: 8}}
actor_train: {devices: 8, strategy: {tensor_parallel: 2, pipeline_parallel: 2}, micro_batch_size: 12, train_micro_batch_size: 8}
actor_infer: {devices: [6, 7, 8, 9], strategy: {tensor_parallel: 2}}
reference: {devices: [0, 1, 2, 3]}
critic: {devices: [10, 11, 12]}
algorithm: {advantage: {name: gae}, kl_in_reward: {coef: 0.1}, ppo_epochs: 3, mini_batches: 2}
"""
    project.write("configs/worked.yaml", f"defaults: [run, _self_]\n{yaml}")
    arithmetic = derive(project.load(name="worked"))
    add, copy = arithmetic.domains
    assert (add.share, add.prompts_per_step, add.samples_per_step, add.max_tokens) == (Fraction(1, 3), 4, 16, 48)
    assert (copy.share, copy.prompts_per_step, copy.samples_per_step, copy.max_tokens) == (Fraction(2, 3), 8, 64, 40)
    assert (arithmetic.samples_per_step, arithmetic.mini_batch_samples, arithmetic.updates_per_step) == (80, 40, 6)
    assert (arithmetic.max_model_len, arithmetic.engine_replicas, arithmetic.device_count) == (48, 2, 13)
    assert {one.role: (one.copies, one.shares_with) for one in arithmetic.clusters} == {
        "actor_train": (2, ("actor_infer", "reference")),
        "actor_infer": (2, ("actor_train",)),
        "reference": (4, ("actor_train",)),
        "critic": (3, ()),
    }
    counts = {
        one.role: (one.samples_per_rank, one.forward_micro_batches, one.train_samples_per_rank, one.train_micro_batches)
        for one in arithmetic.passes
    }
    assert counts == {"actor_train": (40, 4, 20, 3), "reference": (20, 3, None, None), "critic": (27, 4, 14, 2)}


def test_quotas_that_are_no_whole_numbers(project: Project) -> None:
    arithmetic = derive(project.load("rollout.prompts_per_step=7"))
    assert [one.prompts_per_step for one in arithmetic.domains] == [Fraction(7, 2), Fraction(7, 2)]
    assert arithmetic.samples_per_step == 28
    assert "3.50 on average" in render(arithmetic)


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
    assert ["actor_train", "11", "2", "x", "8", "3", "1", "x", "8"] in rows
