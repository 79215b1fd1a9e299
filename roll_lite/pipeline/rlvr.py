"""The RLVR loop: `step` is the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from roll_lite.algorithms.kl import KlController
from roll_lite.algorithms.token_metrics import SampleSums
from roll_lite.config.arithmetic import aggregation_constant, planned_updates, trains, validates, validation_is_due
from roll_lite.config.device_phases import Phase
from roll_lite.config.schema.models import TrainRoleConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.branches import per_sample, sample_rows_of
from roll_lite.data.minibatches import MiniBatch, cut_mini_batches
from roll_lite.data.proto import DataProto
from roll_lite.data.stable_hash import derived_seed
from roll_lite.data.supervised import SupervisedRows
from roll_lite.distributed.dataflow import Batch
from roll_lite.distributed.pending import pause
from roll_lite.distributed.watchdog import WATCHDOG, Preempted
from roll_lite.observability.timers import phase
from roll_lite.pipeline.agreement import Agreement, EnginesDiffer, compare_replicas
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.chaos import faults
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.clusters import DeviceTurn, Model, Models, states, take_turns
from roll_lite.pipeline.early_passes import EarlyPasses
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.recovery import Recovery
from roll_lite.pipeline.shaping import RewardShaping
from roll_lite.pipeline.skipped_updates import SkippedUpdates
from roll_lite.pipeline.sources import BatchSource, Validations
from roll_lite.pipeline.traces import Traces
from roll_lite.scheduler.domain import DataExhausted
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.credit import compared_before_training, credit_columns
from roll_lite.workers.model import CriticWorker, TrainShare, Update
from roll_lite.workers.rollout import RolloutBatch


class RLVRPipeline:
    def __init__(
        self,
        config: RunConfig,
        models: Models,
        source: BatchSource,
        journal: Journal,
        checkpoints: Checkpoints,
        batch_files: BatchFiles,
        ptx: SupervisedRows | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.models = models
        self.source = source
        self.journal = journal
        self.checkpoints = checkpoints
        self.batch_files = batch_files
        self.ptx = ptx
        self.traces = traces or Traces(models, None, journal)
        self.timers = journal.timers
        self.recovery = Recovery(config, models, source, checkpoints, journal)
        self.shaping = RewardShaping(config)
        self.agreement = Agreement(config)
        self.skipped = SkippedUpdates.of(config)
        self.validation = Validations(config, source, journal)
        self.refresh = config.reference.refresh if config.reference is not None and trains(config) else None
        in_reward, in_loss = self.algorithm.kl_in_reward, self.algorithm.kl_in_loss
        self.kl_in_reward = KlController(in_reward.coef, **in_reward.controller.parameters)
        self.kl_in_loss = KlController(in_loss.coef, **in_loss.controller.parameters)
        self.credit_columns = credit_columns(self.algorithm)
        self.actor_columns = ActorWorker.training_reads(self.algorithm)
        self.critic_columns = CriticWorker.training_reads(self.algorithm)
        self.early = EarlyPasses(self.wanted() if config.rollout.stream_log_probs else [], config.rollout.prompts_per_step, journal)
        self.kl_coefs: dict[str, float] = {}
        """KL coefficients in this step: `kl_in_reward`, `kl_in_loss`. The measured KL changes the next step's coefficients."""
        self.compare_later: Callable[[], None] | None = None
        """Comparison of engines and trainer, run after the update: it may pause the run for the user."""
        self.steps_done = 0
        self.last_step = config.steps  # earlier if the prompts were used up (data.epochs)
        self.version = 0
        """Weight version of the actor: number of steps that changed its weights."""

    def run(self) -> None:
        interrupted = self.resume()
        self.journal.ledger.start(self.steps_done, self.version)
        self.recovery.begin(self.state_dict())
        if interrupted is not None:
            self.journal.console.message(f"the validation of step {interrupted} was under way at the checkpoint, and starts again")
            self.recovery.survive(self, partial(self.validate, interrupted))
        if not self.checkpoints.continues_in_folder or self.validation_is_due:  # a run that continues in its folder validates only when due
            self.recovery.survive(self, self.validate)
        if self.config.mode == "evaluate":
            return
        with self.checkpoints.finished(), faults(self.config.chaos, self.journal.console.message):
            try:
                self.train_and_export()
            except Preempted:
                self.save_before_the_end()
                raise

    def train_and_export(self) -> None:
        while True:
            while self.steps_done < self.last_step:
                try:
                    self.survive(self.recorded_step)
                except DataExhausted:
                    self.last_step = self.steps_done
                    self.journal.console.message(f"no prompts are left (domains.*.data.epochs): the run ends after step {self.last_step}")
                    self.survive(self.save_and_validate)
                else:
                    self.survive(self.between_steps)
            self.recovery.survive(self, self.export_model)
            if self.steps_done >= self.last_step:  # otherwise a rank was lost, and the run went back to an earlier step
                return

    def survive(self, work: Callable[[], None]) -> None:
        """Call `work`; again after the loss of a rank or the rollout service, or when the user accepts that engines and trainer differ."""
        while True:
            try:
                return self.recovery.survive(self, work)
            except EnginesDiffer as difference:
                if self.config.rollout.on_mismatch == "end":
                    raise
                with self.journal.paused(difference) as file:
                    self.recovery.survive(self, partial(self.wait_while_there_is, file))
                self.restore(self.recovery.reached)
                self.agreement.accept(difference.version)

    def wait_while_there_is(self, file: Path) -> None:
        while file.exists():
            pause(self.models.actor.ranks.group, 0, f"the user, who deletes {file}")

    def recorded_step(self) -> None:
        self.traces.start(self.steps_done + 1)
        with self.journal.step(self.steps_done + 1):
            self.step()
            with self.recovery.updating():
                self.journal.worked(self.models.take_work())
            self.journal.ledger.step(self.steps_done, self.version)
            self.recovery.step_is_done(self.state_dict())

    def close(self) -> None:
        self.source.close()

    def step(self) -> None:
        with self.source.loaded(Phase.SYNC_WEIGHTS, self.version):
            self.sync_weights()
            with self.source.loaded(Phase.GENERATE, self.version):
                batch = self.generate()
        self.learn(batch)

    def learn(self, batch: Batch) -> None:
        batch = self.shape_rewards(batch)
        if self.models.trained and len(batch) > 0:
            self.compute_log_probs(batch)
            self.assign_credit(batch)
            self.write_batch(batch)
            with self.recovery.updating():
                self.train(batch)
        self.steps_done += 1

    def repeat_update(self, rollouts: RolloutBatch) -> None:
        """Repeat an update whose result was lost with a rank, without recording it again."""
        recorded = self.journal, self.batch_files
        self.journal = self.batch_files = cast(Any, Unrecorded())
        try:
            self.learn(Batch(rollouts.rows, rollouts.blocks))
        finally:
            self.journal, self.batch_files = recorded
        if self.refresh is not None and self.due(self.refresh.every):
            self.refresh_reference()

    # ---------------------------------------------------------------- the verbs of a step

    @phase("sync_weights")
    def sync_weights(self) -> None:
        """Send the actor's weights to engines that lack the current version."""
        self.journal.synced(self.source.sync(self.version))

    @phase("generate")
    def generate(self) -> Batch:
        """Wait for the next batch. Tokens stay in the object store."""
        step = self.steps_done + 1
        self.early.forget()
        rollouts = self.recovery.batch(step, lambda: self.source.next_batch(step, self.early.poll))
        self.journal.rollouts(per_sample(rollouts.rows), rollouts.stats, self.version, rollouts.replaced, rollouts.silences)
        return Batch(rollouts.rows, rollouts.blocks)

    @phase("advantages")
    def shape_rewards(self, batch: Batch) -> Batch:
        """Compute rewards from scores; mask samples that must not train."""
        shaped = self.shaping(batch)
        self.journal.shaped(shaped.rows, shaped.masked)
        return shaped.batch

    @phase("log_probs")
    def compute_log_probs(self, batch: Batch) -> None:
        """Compute columns (such as log-probs) that advantages and losses need and rows lack."""
        self.early.join(batch)
        left = [(model, batch.take(batch.lacking(columns)), columns) for model, columns in self.wanted()]
        turns = [
            DeviceTurn(model, partial(model.start_forward, rows, columns), partial(self.timers.part, model.ranks.name))
            for model, rows, columns in left
            if len(rows) > 0
        ]
        for blocks in take_turns(turns, states(Phase.LOG_PROBS)):
            batch.add(block for block in blocks if block is not None)

    @phase("advantages")
    def assign_credit(self, batch: Batch) -> None:
        """Compute advantages from rewards and KL, on the actor's ranks."""
        actor, kl_coef = self.models.actor, self.kl_in_reward.coef
        self.kl_coefs = {"kl_in_reward": kl_coef, "kl_in_loss": self.kl_in_loss.coef}
        reports = actor.ranks.heads_scatter(ActorWorker.assign_credit, actor.shards(batch, self.credit_columns), kl_coef)
        batch.add(report.block for report in reports)
        self.journal.credit(reports, kl_coef)
        if compared_before_training(self.algorithm):
            self.compare(self.version, batch.rows, [report.mismatch for report in reports])
        # The estimator `abs` is no estimate of the KL; k3, on the same tokens, is.
        measured = "credit/kl_ref" if self.algorithm.kl_in_reward.estimator == "abs" else "credit/kl_in_reward"
        samples = training_rows(batch) if self.actor_trains else 0  # an actor that stays the reference would only lower the coefficient
        self.kl_in_reward.step(per_token([report.sums for report in reports], measured, "credit/tokens"), samples)

    @phase("write_batch")
    def write_batch(self, batch: Batch) -> None:
        if self.batch_files.writes(step := self.steps_done + 1):
            self.batch_files.write(step, self.models.actor, batch, self.cut(batch), self.kl_coefs)

    @phase("train")
    def train(self, batch: Batch) -> None:
        """Train actor and critic, in one call each for all epochs and mini-batches."""
        mini_batches, kl_coef = self.cut(batch), self.kl_in_loss.coef
        actor, critic = self.models.actor, self.models.critic
        turns: dict[str, DeviceTurn[list[list[Update]]]] = {}
        supervised: list[DataProto] = []
        if self.actor_trains:
            own = self.with_supervised(actor.shares(batch, self.actor_columns, mini_batches, self.first_update("actor_train")))
            supervised = [DataProto.concat(rows) for rows in zip(*(share.supervised for share in own), strict=True)]
            self.batch_files.write_supervised(self.steps_done + 1, supervised)
            work = partial(actor.ranks.start_scatter, ActorWorker.train, own, kl_coef)
            turns["actor"] = DeviceTurn(actor, work, partial(self.timers.part, "actor_train"))
        if critic is not None:
            own = critic.shares(batch, self.critic_columns, mini_batches, self.first_update("critic"))
            work = partial(critic.ranks.start_scatter, CriticWorker.train, own)
            turns["critic"] = DeviceTurn(critic, work, partial(self.timers.part, "critic"))
        updates = dict(zip(turns, take_turns(list(turns.values()), states(Phase.TRAIN)), strict=True))
        if self.ptx is not None and "actor" in updates:
            self.ptx.take_back(made=len(updates["actor"][0]))
        self.journal.updates(self.steps_done + 1, updates, kl_coef)
        self.journal.ledger.updates(self.steps_done + 1, batch.rows, mini_batches, updates)
        if not compared_before_training(self.algorithm):
            found = [update.mismatch for rank in updates.get("actor", []) for update in rank]
            compare = partial(self.compare, self.version, batch.rows, found)
            if self.config.rollout.on_mismatch == "pause" and not self.repeats:
                self.compare_later = compare  # the update is done: a pause comes after the step
            else:
                compare()
        self.version += "actor" in updates
        for first in self.skipped.count(self.steps_done + 1, updates):  # first.update counts from 1
            further = supervised[first.update - 1] if supervised and first.role == "actor" else None
            self.batch_files.write_skipped(first, actor, batch, mini_batches[first.update - 1], self.kl_coefs, further)
            self.journal.skipped(first)
        sums = [update.result.metrics for update in updates.get("actor", [[]])[0] if not update.result.skipped]
        self.kl_in_loss.step(per_token(sums, "actor/kl_ref", "actor/tokens"), training_rows(batch) if sums else 0)

    @property
    def repeats(self) -> bool:
        return isinstance(self.journal, Unrecorded)

    def compare(self, version: int, rows: DataProto, found: list[SampleSums]) -> None:
        """Raise EnginesDiffer if log-probs of engines and trainer differ too much, except in an update repeated after a loss."""
        try:
            self.agreement.check(version, rows, found)
        except EnginesDiffer:
            if not self.repeats:
                raise

    # ---------------------------------------------------------------- between steps

    def between_steps(self) -> None:
        if self.refresh is not None and self.due(self.refresh.every):
            self.refresh_reference()  # first: a SIGTERM in one of the following waits saves the state after this step
        self.traces.write(self.steps_done)
        compare, self.compare_later = self.compare_later, None
        if compare is not None:
            compare()
        self.look_at_checkpoint()
        self.look_at_validation()
        self.skipped.check()
        self.save_and_validate()

    def save_and_validate(self) -> None:
        saves = self.due(self.config.checkpoint.every) or (self.config.checkpoint.every > 0 and self.steps_done == self.last_step)
        self.compare_replicas(saves)
        if saves and self.steps_done:
            self.save_checkpoint()
        if self.due(self.checkpoints.copy_every):
            self.copy_state()
        if self.validation_is_due:
            self.validate()
        if self.steps_done == self.last_step:
            with self.timers.phase("validation"):
                self.validation.finish(self.version)

    @phase("validation")
    def validate(self, step: int | None = None) -> None:
        """Validate the present weights. `step`: reported with the results; None: the last complete one."""
        step = self.steps_done if step is None else step
        if not validates(self.config):
            return
        repeats = self.validation.step == step  # a rank was lost meanwhile
        if repeats and self.validation.under_way is None:
            return
        if not repeats:
            self.validation.finish(self.version)
        with self.source.loaded(Phase.SYNC_WEIGHTS, self.version):
            self.source.sync(self.version)
            with self.source.loaded(Phase.GENERATE, self.version):
                if repeats:
                    self.validation.wait(self.version)
                else:
                    self.validation.begin(step, self.version)

    @phase("validation")
    def look_at_validation(self) -> None:
        self.validation.finish_if_complete(self.version)

    @phase("train")
    def compare_replicas(self, saves: bool) -> None:
        roles: dict[str, TrainRoleConfig | None] = {"actor_train": self.config.actor_train, "critic": self.config.critic}
        for name, model in self.models.trained.items():
            role = roles[name]
            every = role.compare_replicas_every if role is not None else 0
            if every and (saves or self.due(every)):
                compare_replicas(model, self.steps_done)

    @phase("checkpoint")
    def refresh_reference(self) -> None:
        assert self.refresh is not None
        with WATCHDOG.uninterrupted():
            self.checkpoints.refresh_reference(self.models, self.refresh)

    @phase("checkpoint")
    def save_checkpoint(self) -> None:
        with WATCHDOG.uninterrupted():
            state, unfinished = self.source.state_dict(), b""
            if self.config.checkpoint.unfinished:
                state, unfinished = self.source.unfinished(state)
            self.checkpoints.save(self.models, state, self.state_dict(), unfinished)

    @phase("checkpoint")
    def copy_state(self) -> None:
        self.checkpoints.copy_state(self.models, self.recovery.source_state, self.recovery.reached)

    @phase("checkpoint")
    def save_before_the_end(self) -> None:
        """Save the state after the last complete step, within the time left after a SIGTERM."""
        seconds = WATCHDOG.preempted_for(self.config.checkpoint.on_sigterm_s)
        with WATCHDOG.uninterrupted(), WATCHDOG.limit("checkpoint", seconds, "checkpoint.on_sigterm_s"):
            unfinished, state = b"", self.recovery.source_state
            under_way, lost = self.validation.under_way, self.recovery.lost_validation
            interrupted = lost if under_way is None else under_way
            reached = {**self.recovery.reached, "validation": interrupted}
            if interrupted is not None and interrupted > reached["steps_done"]:  # the run goes back to a step before it
                reached["validation"] = None
            if self.config.checkpoint.unfinished and not self.recovery.service_is_lost:
                with suppress(Exception):  # if this fails, their prompts start again
                    state, unfinished = self.source.unfinished(state, seconds / 4)
            self.source.abandon(seconds / 4)
            if step := reached["steps_done"]:
                self.checkpoints.save(self.models, state, reached, unfinished)
                self.checkpoints.finish()
            self.checkpoints.upload_last(self.models)
        self.journal.console.message(f"SIGTERM: saved the state after step {step}")

    @phase("checkpoint")
    def look_at_checkpoint(self) -> None:
        self.checkpoints.finish_if_written()

    @phase("checkpoint")
    def export_model(self) -> None:
        self.checkpoints.finish()
        if self.config.checkpoint.export_model:
            self.checkpoints.export_model(self.models)
        self.checkpoints.upload_last(self.models)

    def resume(self) -> int | None:
        """Load the checkpoint, if any; return the step whose validation was under way then."""
        state = self.checkpoints.load(self.models, self.source)
        if state is None:
            return None
        self.restore(state)
        self.journal.resumed(self.steps_done, self.checkpoints.newest)
        return state.get("validation") if self.checkpoints.continues_in_folder and validates(self.config) else None

    def restore(self, state: dict[str, Any]) -> None:
        self.steps_done, self.version = state["steps_done"], state["version"]
        for name, part in self.remembering.items():
            if name in state:  # algorithm.ptx may be new; Checkpoints leaves out what starts anew
                part.load_state_dict(state[name])

    def state_dict(self) -> dict[str, Any]:
        remembered = {name: part.state_dict() for name, part in self.remembering.items()}
        return {"steps_done": self.steps_done, "version": self.version, "validation": self.validation.under_way, **remembered}

    # ---------------------------------------------------------------- derived from the configuration

    def due(self, every: int) -> bool:
        return every > 0 and self.steps_done % every == 0

    @property
    def actor_trains(self) -> bool:
        return self.steps_done >= self.algorithm.critic_warmup_steps

    @property
    def validation_is_due(self) -> bool:
        return self.steps_done == self.last_step or validation_is_due(self.config, self.steps_done)

    def first_update(self, role: str) -> int:
        return planned_updates(self.config, role, self.steps_done)

    def wanted(self) -> list[tuple[Model[Any], list[str]]]:
        return [(model, columns) for model in self.models.all if (columns := self.wanted_of(model))]

    def wanted_of(self, model: Model[Any]) -> list[str]:
        read = self.credit_columns.wanted | self.actor_columns.wanted | self.critic_columns.wanted
        return [column for column in model.worker.computes if column in read]

    @property
    def remembering(self) -> dict[str, RewardShaping | KlController | SkippedUpdates | Agreement | SupervisedRows]:
        """Driver objects with state in checkpoints, besides `steps_done` and `version`."""
        of_ptx = {} if self.ptx is None else {"ptx": self.ptx}
        return {
            "shaping": self.shaping,
            "kl_in_reward": self.kl_in_reward,
            "kl_in_loss": self.kl_in_loss,
            "skipped": self.skipped,
            "agreement": self.agreement,
            **of_ptx,
        }

    def with_supervised(self, shares: list[TrainShare]) -> list[TrainShare]:
        if self.ptx is None:
            return shares
        ranks = self.models.actor.ranks
        further = self.ptx.shares(len(shares[0].mini_batches), len(shares), ranks.layouts[0].attention_parity_tokens)
        return [replace(share, supervised=rows) for share, rows in zip(shares, further, strict=True)]

    def cut(self, batch: Batch) -> list[MiniBatch]:
        of = sample_rows_of(batch.rows)
        return cut_mini_batches(
            batch.rows.tensor("sample").numpy(),
            batch.rows.tensor("policy_tokens").numpy(),
            batch.rows.tensor("train_weight").numpy(),
            epochs=self.algorithm.ppo_epochs,
            mini_batches=self.algorithm.mini_batches,
            aggregation=self.algorithm.aggregation,
            constant=aggregation_constant(self.config),
            seed=derived_seed(self.config.seed, "mini_batches", self.steps_done + 1),
            owners=None if of is None else of.sample,
            rows_are_sequences=self.algorithm.sequence == "row",
        )


class Unrecorded:
    """Replaces journal and batch files: every call does nothing."""

    def __getattr__(self, _: str) -> Unrecorded:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def training_rows(batch: Batch) -> int:
    return int((per_sample(batch.rows).tensor("train_weight") > 0).sum())


def per_token(parts: Sequence[Mapping[str, float]], name: str, tokens: str) -> float:
    """Return a metric's mean per token over all domains. `parts`: sums under `<name>#<i>`, token counts under `<tokens>#<i>` (domain i)."""
    total, count = (sum(value for part in parts for key, value in part.items() if key.startswith(f"{what}#")) for what in (name, tokens))
    return total / max(count, 1.0)
