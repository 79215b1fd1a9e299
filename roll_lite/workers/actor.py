from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import ray

from roll_lite.algorithms.losses import row_mean
from roll_lite.algorithms.token_metrics import SampleSums
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.data.columns_file import write_rows
from roll_lite.data.keys import Columns
from roll_lite.data.microbatch import padded
from roll_lite.data.proto import Column, DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.dataflow import BatchShard, Block, put_block
from roll_lite.distributed.weight_sync.endpoints import WeightSender
from roll_lite.distributed.weight_sync.group import TransferError, Transferred
from roll_lite.distributed.weight_sync.plan import ExportPlan, Membership, TransferPlan
from roll_lite.workers.credit import assign_credit, compared_before_training, credit_metrics
from roll_lite.workers.model import ModelRole, ModelWorker, ReferenceWorker, TrainShare, Update, training_columns
from roll_lite.workers.objectives import ActorLoss


@dataclass(frozen=True)
class CreditReport:
    """Advantages and metrics of one rank: `sums` add up over ranks, `peaks` are extremes."""

    block: Block
    sums: dict[str, float]
    peaks: dict[str, float]
    advantages: dict[int, float] = field(default_factory=dict)
    """{sample number: mean advantage of its policy tokens}."""
    mismatch: SampleSums = field(default_factory=dict)
    """Log-prob differences between engine and trainer; empty if not measured before the updates."""


REPLAYED_COLUMN: dict[str, str | None] = {"none": None, "train": "old_experts", "rollout": "rollout_experts"}
"""{algorithm.routing_replay: batch column with the MoE experts that training reuses}; None: the router chooses anew."""


def actor_loss(algorithm: AlgorithmConfig, domains: int) -> ActorLoss:
    return ActorLoss(
        policy_loss=algorithm.policy_loss,
        mismatch_correction=algorithm.mismatch_correction,
        kl_coef=algorithm.kl_in_loss.coef,
        kl_estimator=algorithm.kl_in_loss.estimator,
        kl_unbiased_gradient=algorithm.kl_in_loss.unbiased_gradient,
        entropy_coef=algorithm.entropy_coef,
        old_log_probs=algorithm.old_log_probs,
        measure_entropy=not compared_before_training(algorithm),
        domains=domains,
    )


class ActorWorker(ModelWorker):
    computes: ClassVar[Mapping[str, str]] = {
        "old_log_probs": "log_probs",
        "old_entropy": "entropy",
        "old_distribution": "distribution",
        "old_experts": "experts",
    }
    forward_columns = Columns(reads=("input_ids", "response_mask", "temperature"), if_there=("kept_ids", "rollout_experts"))

    def __init__(self, role: ModelRole, algorithm: AlgorithmConfig, domains: int) -> None:
        super().__init__(role)
        self.algorithm = algorithm
        self.domains = domains
        self.loss = actor_loss(algorithm, domains)

    @staticmethod
    def training_reads(algorithm: AlgorithmConfig) -> Columns:
        measured = ["kept_ids", "ref_log_probs", *(() if compared_before_training(algorithm) else ("rollout_log_probs",))]
        replayed = REPLAYED_COLUMN[algorithm.routing_replay]
        needed = ("temperature", *actor_loss(algorithm, 1).columns, *([] if replayed is None else [replayed]))
        return training_columns(needed, measured)

    def assign_credit(self, shard: BatchShard, kl_coef: float) -> CreditReport:
        """Compute advantages and critic targets. Collective over RankLayout heads."""
        batch = shard.materialize()
        rows = padded(batch)  # the whole shard at once: a few numbers per token, no activations
        credit = assign_credit(rows, self.strategy.layout.data_rank, self.algorithm, kl_coef, self.gather_from_heads)
        lengths = batch.lengths - 1
        columns: dict[str, Column] = {"sample": batch.tensor("sample"), "advantages": Ragged.from_padded(credit.advantages, lengths)}
        if credit.returns is not None:
            columns["returns"] = Ragged.from_padded(credit.returns, lengths)
        sums, peaks, mismatch = credit_metrics(rows, credit, self.algorithm.old_log_probs, self.domains)
        means = row_mean(credit.advantages, rows.mask).flatten().tolist()
        advantages = dict(zip(batch.tensor("sample").tolist(), means, strict=True))
        return CreditReport(put_block(DataProto(columns)), sums, peaks, advantages, mismatch)

    def write_rows(self, shard: BatchShard, folder: Path) -> None:
        write_rows(folder, self.strategy.layout.data_rank, shard.materialize())

    def save_adapters(self, folder: Path) -> list[str]:
        return [path.name for path in self.strategy.save_adapters(folder)]

    def train(self, share: TrainShare, kl_coef: float) -> list[Update]:
        """Train on every mini-batch of every epoch; stop when an update moves the policy too far (early_stop_kl)."""
        loss = replace(self.loss, kl_coef=kl_coef)
        updates: list[Update] = []
        for update in self._train(share, loss):
            result, peaks, mismatch = update.result, loss.peaks.collect(), loss.mismatch.collect()
            if updates or compared_before_training(self.algorithm):
                result, peaks, mismatch = replace(result, metrics=without_mismatch(result.metrics)), without_mismatch(peaks), {}
            updates.append(replace(update, result=result, peaks=peaks, ratios=loss.ratios.collect(), mismatch=mismatch))
            if not result.skipped and moved_too_far(result.metrics, self.algorithm.early_stop_kl):
                break
        return updates

    # ---------------------------------------------------------------- weights for the engines

    @cached_property
    def weight_sender(self) -> WeightSender:
        return WeightSender(self.strategy, self.rank)

    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        return self.weight_sender.export_plan(bucket_bytes)

    def host_weight_transfer(self, timeout_s: float) -> tuple[str, int]:
        address = ray.util.get_node_ip_address()
        return address, self.weight_sender.host(address, timeout_s)

    def connect_weights(self, plan: TransferPlan, membership: Membership) -> Transferred:
        return transferred(lambda: self.weight_sender.connect(plan, membership))

    def send_weights(self) -> Transferred:
        with self.phases.of("sync_weights"):
            sent, counted = transferred(self.weight_sender.send), self.weight_sender
        return replace(sent, seconds=counted.seconds, nbytes=counted.nbytes, by_transport=counted.by_transport)

    def weight_checksums(self, names: Collection[str]) -> dict[str, str]:
        return self.weight_sender.checksums(names)


class AdaptedActorWorker(ActorWorker):
    """Actor with LoRA adapters. With the adapters off, it computes the reference's log-probs."""

    computes: ClassVar[Mapping[str, str]] = {**ReferenceWorker.computes, **ActorWorker.computes}

    def forward_pass(self, batch: DataProto, columns: Sequence[str]) -> dict[str, Column] | None:
        of_reference = [name for name in columns if name in ReferenceWorker.computes]
        own = [name for name in columns if name not in ReferenceWorker.computes]
        found: dict[str, Column] | None = {}
        if of_reference:
            with self.strategy.adapters_off():  # the reference's own router chooses experts
                found = super().forward_pass(batch.select(name for name in batch.columns if name != "rollout_experts"), of_reference)
        if own:
            policy = super().forward_pass(batch, own)
            found = None if found is None or policy is None else found | policy
        return found


def transferred(transfer: Callable[[], None]) -> Transferred:
    try:
        transfer()
    except TransferError as error:
        return Transferred.broke_off(error)
    return Transferred()


def moved_too_far(metrics: Mapping[str, float], limit: float | None) -> bool:
    """True if an update's mean KL per token exceeds the limit or is NaN; equal on all ranks."""
    if limit is None:
        return False
    kl, tokens = (sum(value for name, value in metrics.items() if name.startswith(f"actor/{what}#")) for what in ("approx_kl", "tokens"))
    return not kl <= limit * tokens


def without_mismatch(sums: Mapping[str, float]) -> dict[str, float]:
    """Drop the metrics of log-prob mismatch between engine and trainer: after an update they include its effect."""
    return {name: value for name, value in sums.items() if not name.startswith("mismatch/")}
