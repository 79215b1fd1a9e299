"""The RLVR loop: `step` is the algorithm, the verbs below it say what its words mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from roll_lite.algorithms.kl_controller import KlController
from roll_lite.config.arithmetic import aggregation_constant
from roll_lite.config.schema import GaeAdvantageConfig, KlInLossConfig, KlInRewardConfig, RunConfig
from roll_lite.data.minibatches import MiniBatch, cut_mini_batches, spread
from roll_lite.distributed.cluster import Pending, gather
from roll_lite.distributed.dataflow import Batch, Block
from roll_lite.distributed.strategy.base import EngineMemory
from roll_lite.observability.timers import phase
from roll_lite.pipeline.agreement import Agreement
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.models import FORWARD, TRAIN, Model, lengths
from roll_lite.pipeline.parts import Parts
from roll_lite.pipeline.shaping import RewardShaping
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.critic import CriticWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.model import TrainShare, Update
from roll_lite.workers.reference import ReferenceWorker
from roll_lite.workers.rollout import RolloutWorker

CREDIT_ROWS = ("reward", "group", "train_weight", "truncated", "domain_number")


class RLVRPipeline:
    """Takes the clusters of a run through its steps."""

    def __init__(self, config: RunConfig, parts: Parts, journal: Journal, checkpoints: Checkpoints) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.parts = parts
        self.journal = journal
        self.checkpoints = checkpoints
        self.timers = journal.timers
        self.shaping = RewardShaping(config)
        self.agreement = Agreement(config)
        self.kl_in_reward = KlController(self.algorithm.kl_in_reward.controller, self.algorithm.kl_in_reward.coef)
        self.kl_in_loss = KlController(self.algorithm.kl_in_loss.controller, self.algorithm.kl_in_loss.coef)
        self.steps_done = 0
        self.version = 0
        """Of the actor's weights: the number of steps that changed them."""

    def run(self) -> None:
        self.resume()
        self.validate()
        while self.steps_done < self.config.steps:
            with self.journal.step(self.steps_done + 1):
                self.step()
            self.agreement.look(self.journal.history.records[self.steps_done])
            if self.due(self.config.checkpoint.every):
                self.save_checkpoint()
            if self.due(self.config.validation.every) or self.steps_done == self.config.steps:
                self.validate()
        self.export_model()

    def close(self) -> None:
        """The last samples are on disk, the engines have cleaned up behind them."""
        self.parts.rollouts.one(RolloutWorker.shutdown)
        self.parts.engines.replicas.all(InferWorker.shutdown)

    def step(self) -> None:
        engines = self.parts.engines
        with engines.loaded(EngineMemory.WEIGHTS):
            self.sync_weights()
            with engines.loaded(EngineMemory.KV_CACHE):
                batch = self.generate()
        batch = self.shape_rewards(batch)
        if len(batch) > 0:
            self.compute_log_probs(batch)
            self.assign_credit(batch)
            self.train(batch)
        self.steps_done += 1

    # ---------------------------------------------------------------- the verbs of a step

    @phase("sync_weights")
    def sync_weights(self) -> None:
        """The engines get the actor's weights, unless they have them already."""
        self.journal.synced(self.parts.weights.push(self.version))

    @phase("generate")
    def generate(self) -> Batch:
        """The next finished groups: rows come here, tokens stay in the object store."""
        rollouts = self.parts.rollouts.one(RolloutWorker.next_batch, self.config.rollout.prompts_per_step, self.steps_done + 1)
        self.journal.rollouts(rollouts.rows, rollouts.stats, self.version, rollouts.replaced)
        return Batch(rollouts.rows, rollouts.blocks)

    @phase("advantages")
    def shape_rewards(self, batch: Batch) -> Batch:
        """Scores become rewards; what is masked does not train."""
        shaped = self.shaping(batch)
        self.journal.shaped(shaped.rows, shaped.masked)
        return shaped.batch

    @phase("log_probs")
    def compute_log_probs(self, batch: Batch) -> None:
        """Log-probs of the reference, of the policy before the step, and values: side by side, each on its own cluster."""
        actor, reference, critic = self.parts.actor, self.parts.reference, self.parts.critic
        keys = ["sample", "input_ids", *kept(batch)]
        whole = self.full_kl(self.algorithm.kl_in_reward) or self.full_kl(self.algorithm.kl_in_loss)
        pending: list[Pending[list[Block | None]]] = []
        with ExitStack() as stack:
            if reference is not None:
                stack.enter_context(reference.loaded(FORWARD))
                pending.append(reference.ranks.start_scatter(ReferenceWorker.log_probs, reference.shards(batch, keys), whole))
            if self.algorithm.old_log_probs == "recompute":
                stack.enter_context(actor.loaded(FORWARD))
                pending.append(
                    actor.ranks.start_scatter(
                        ActorWorker.old_log_probs, actor.shards(batch, keys), self.full_kl(self.algorithm.kl_in_reward)
                    )
                )
            if critic is not None:
                stack.enter_context(critic.loaded(FORWARD))
                shards = critic.shards(batch, ["sample", "input_ids"])
                pending.append(critic.ranks.start_scatter(CriticWorker.values, shards, self.bootstraps))
            for blocks in gather(*pending):
                batch.add(block for block in blocks if block is not None)

    @phase("advantages")
    def assign_credit(self, batch: Batch) -> None:
        """Scores and KL become token rewards and those advantages, where the tokens are."""
        actor = self.parts.actor
        keys = ["sample", "input_ids", "response_mask", "rollout_log_probs", *CREDIT_ROWS, *self.computed_keys]
        reports = actor.ranks.heads_scatter(ActorWorker.assign_credit, actor.shards(batch, keys), self.kl_in_reward.coef)
        batch.add([report.block for report in reports])
        self.journal.credit(reports, self.kl_in_reward.coef)
        if self.kl_in_reward.coef > 0:
            self.kl_in_reward.step(per_token([report.sums for report in reports], "credit/kl_in_reward", "credit/tokens"), len(batch))

    @phase("train")
    def train(self, batch: Batch) -> None:
        """Actor and critic side by side, each through all mini-batches of all epochs in one call."""
        actor, critic = self.parts.actor, self.parts.critic
        mini_batches = self.cut(batch)
        pending: dict[str, Pending[list[list[Update]]]] = {}
        with ExitStack() as stack:
            if self.steps_done >= self.algorithm.critic_warmup_steps:
                keys = ["sample", "input_ids", "response_mask", "advantages", "domain_number", *self.policy_keys, *kept(batch)]
                stack.enter_context(actor.loaded(TRAIN))
                pending["actor"] = actor.ranks.start_scatter(
                    ActorWorker.train, shares(actor, batch, mini_batches, keys), self.kl_in_loss.coef
                )
            if critic is not None:
                keys = ["sample", "input_ids", "response_mask", "values", "returns", "domain_number"]
                stack.enter_context(critic.loaded(TRAIN))
                pending["critic"] = critic.ranks.start_scatter(CriticWorker.train, shares(critic, batch, mini_batches, keys))
            updates = dict(zip(pending, gather(*pending.values()), strict=True))
        self.version += "actor" in updates
        self.journal.updates(self.steps_done + 1, updates, self.kl_in_loss.coef)
        if "actor" in updates and self.kl_in_loss.coef > 0:
            sums = [update.result.metrics for update in updates["actor"][0] if not update.result.skipped]
            self.kl_in_loss.step(per_token(sums, "actor/kl_ref", "actor/tokens"), len(batch) if sums else 0)

    # ---------------------------------------------------------------- between steps

    @phase("validation")
    def validate(self) -> None:
        """Held-out prompts of every domain that has some."""
        settings = self.config.validation
        if not settings.enabled:
            return
        engines = self.parts.engines
        with engines.loaded(EngineMemory.WEIGHTS):
            self.parts.weights.push(self.version)
            with engines.loaded(EngineMemory.KV_CACHE):
                rows, stats = self.parts.rollouts.one(
                    RolloutWorker.evaluate, settings.samples_per_prompt, settings.temperature, self.steps_done
                )
        self.journal.validation(self.steps_done, rows, stats)

    @phase("checkpoint")
    def save_checkpoint(self) -> None:
        self.checkpoints.save(self.parts, self.state_dict())

    @phase("checkpoint")
    def export_model(self) -> None:
        if self.config.checkpoint.export_model:
            self.checkpoints.export_model(self.parts)

    def resume(self) -> None:
        """Go on from the checkpoint that the configuration names, if it names one."""
        state = self.checkpoints.load(self.parts)
        if state is not None:
            self.steps_done, self.version = state["steps_done"], state["version"]
            for name, part in self.remembering.items():
                part.load_state_dict(state[name])
            self.journal.resumed(self.steps_done)

    def state_dict(self) -> dict[str, Any]:
        remembered = {name: part.state_dict() for name, part in self.remembering.items()}
        return {"steps_done": self.steps_done, "version": self.version, **remembered}

    # ---------------------------------------------------------------- what is decided from the configuration

    def due(self, every: int) -> bool:
        return every > 0 and self.steps_done % every == 0

    @property
    def computed_keys(self) -> list[str]:
        """Columns of compute_log_probs that credit is assigned from."""
        keys = ["old_log_probs", "old_entropy"] if self.algorithm.old_log_probs == "recompute" else []
        keys += ["ref_log_probs"] if self.parts.reference is not None else []
        keys += ["old_distribution", "ref_distribution"] if self.full_kl(self.algorithm.kl_in_reward) else []
        keys += ["baseline_score"] if self.algorithm.advantage.name == "remax" else []
        keys += ["values"] if self.parts.critic is not None else []
        return keys + (["final_value"] if self.bootstraps else [])

    @property
    def policy_keys(self) -> list[str]:
        """Columns that the policy loss reads beside the advantages."""
        recomputed = self.algorithm.old_log_probs == "recompute"
        keys = ["old_log_probs"] if recomputed else []
        # Where the old log-probs are recomputed, engine and trainer have been compared when credit was assigned.
        keys += ["rollout_log_probs"] if not recomputed or self.algorithm.mismatch_correction is not None else []
        keys += ["ref_log_probs"] if self.parts.reference is not None else []
        return keys + (["ref_distribution"] if self.full_kl(self.algorithm.kl_in_loss) else [])

    @property
    def bootstraps(self) -> bool:
        """The critic says what the end of a truncated response is worth."""
        return isinstance(self.algorithm.advantage, GaeAdvantageConfig) and self.algorithm.advantage.bootstrap_truncated

    @property
    def remembering(self) -> dict[str, RewardShaping | KlController]:
        """What a checkpoint has to hold of the driver, besides the counts."""
        return {"shaping": self.shaping, "kl_in_reward": self.kl_in_reward, "kl_in_loss": self.kl_in_loss}

    @staticmethod
    def full_kl(term: KlInRewardConfig | KlInLossConfig) -> bool:
        return term.coef > 0 and term.estimator == "full"

    def cut(self, batch: Batch) -> list[MiniBatch]:
        return cut_mini_batches(
            batch.rows.tensor("sample").numpy(),
            batch.rows.tensor("policy_tokens").numpy(),
            batch.rows.tensor("train_weight").numpy(),
            epochs=self.algorithm.ppo_epochs,
            mini_batches=self.algorithm.mini_batches,
            aggregation=self.algorithm.aggregation,
            constant=aggregation_constant(self.config),
            seed=self.config.seed + self.steps_done,
        )


def kept(batch: Batch) -> list[str]:
    """The column of the tokens that survived truncation, where the engines have sent one."""
    return ["kept_ids"] if "kept_ids" in batch else []


def per_token(parts: Sequence[Mapping[str, float]], name: str, tokens: str) -> float:
    """Of sums by domain, the mean over all."""
    total, count = (sum(value for part in parts for key, value in part.items() if key.startswith(f"{what}#")) for what in (name, tokens))
    return total / max(count, 1.0)


def shares(model: Model[Any], batch: Batch, mini_batches: list[MiniBatch], keys: list[str]) -> list[TrainShare]:
    """Every data-parallel rank gets the rows that it needs in any mini-batch once, and its part of each mini-batch."""
    samples = batch.rows.tensor("sample").tolist()
    row_of = {sample: row for row, sample in enumerate(samples)}
    spreads = spread(mini_batches, dict(zip(samples, lengths(batch).tolist(), strict=True)), model.data_size)
    rows = [sorted({row_of[int(sample)] for part in own for sample in part.samples}) for own in spreads]
    shards = batch.shards([np.array(own, dtype=np.int64) for own in rows], keys)
    return [TrainShare(shard, own) for shard, own in zip(shards, spreads, strict=True)]
