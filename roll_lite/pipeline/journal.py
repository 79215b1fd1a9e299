"""Record of a run: metrics, console, summary, picture."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from ray.exceptions import RayError

from roll_lite.algorithms.at_k import AT_K, SampledPrompts, accuracy_error, every_k
from roll_lite.algorithms.rewards import Masked
from roll_lite.algorithms.token_metrics import nearest_rank, ratio_percentiles
from roll_lite.config.arithmetic import validates, validation_is_due
from roll_lite.config.checks.algorithm import compares_groups
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.branches import per_sample
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import FinishReason
from roll_lite.distributed.failures import RankFailed
from roll_lite.distributed.place import Place, member_places
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.weight_sync.group import Pushed
from roll_lite.files import replacing, write_json, write_whole
from roll_lite.observability.console import RunConsole
from roll_lite.observability.curves import CURVES_FILE, draw_curves
from roll_lite.observability.device_memory import PeaksByPhase
from roll_lite.observability.health import RunHealth
from roll_lite.observability.metric_table import EPISODES
from roll_lite.observability.metrics import ALL_DOMAINS, MetricSums
from roll_lite.observability.report import (
    LivePicture,
    LiveReport,
    Measures,
    Results,
    held_out_change,
    write_evaluation,
    write_summary,
)
from roll_lite.observability.run_folder import continues_in_folder, cut_after, folder_of_checkpoints
from roll_lite.observability.timers import STEP, Span, StepTimers
from roll_lite.observability.trackers import METRICS_FILE, HistoryTracker, TrackedRun, Trackers, build_trackers, shown_settings
from roll_lite.pipeline.checkpoint_files import known_tracker_ids, resumption, steps_of
from roll_lite.pipeline.ledger import Ledger
from roll_lite.pipeline.skipped_updates import Skipped
from roll_lite.scheduler.filters import FUNCTION, HIGH, LOW
from roll_lite.scheduler.stats import RolloutStats, commonest
from roll_lite.workers.actor import CreditReport
from roll_lite.workers.model import Update
from roll_lite.workers.phases import PhaseWork, RankWork

UPDATES_FILE = "updates.jsonl"
SPANS_FILE = "spans.jsonl"
MOST_RANKS = 32
"""Training ranks per role whose spans are in SPANS_FILE."""
FAILURE_FILE = "failure.txt"
PAUSED_FILE = "paused.txt"
"""Reason of a pause; deleting the file continues the run."""
PROCESSES_FILE = "processes.json"
"""Node and process id of each process."""
SHOWN_EVERY = 10
"""Steps between samples shown in trackers."""
CREDIT_FOLDER = "credit"
CREDIT_NUMBERS = ("group", "index", "prompt_uid", "epoch", "score", "reward", "train_weight", "policy_tokens")
NUMBER = re.compile(r"\w*\d\w*(\.\d+)?")
"""Numbers and words with digits, ignored when messages are compared."""

SOLVED = {
    "none": (-1.0, 0.0),
    "quarter": (0.0, 0.25),
    "half": (0.25, 0.5),
    "three_quarters": (0.5, 0.75),
    "most": (0.75, 1.0 - 1e-6),
    "all": (1.0 - 1e-6, 1.0),
}
"""Bins of a group's fraction of correct samples: low < fraction <= high."""


class Journal:
    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder_of_checkpoints(config, folder)
        self.timers = StepTimers()
        self.history = HistoryTracker()
        self.ledger = Ledger(config, folder)
        self._domains = list(config.domains)
        self.console = RunConsole(self._domains, config.steps)
        self.health = RunHealth(compares_groups(config), self._domains)
        self._config = config
        self._trackers = Trackers([self.history])
        self._sums = MetricSums()
        self._first = self._steps = 0
        self._tokens = defaultdict[int, dict[str, int]](lambda: {"prompt": 0, "response": 0, "trained": 0})
        """{step: total tokens by its end, since the driver started}."""
        self._lost_engines: set[int] = set()
        self._moves = Counter[str]()
        self._told: dict[tuple[str, str], tuple[int, str]] = {}
        """Printed messages: {(place, text without numbers): (occurrences, first full text)}."""
        self._places: list[tuple[str, int, Place]] = []
        self._picture = LivePicture(self._draw)
        self._report = LiveReport(folder, config.report_every)
        self.current = 0
        self._work: Mapping[str, Sequence[RankWork]] = {}
        self._pool_work: Sequence[Span] = ()
        self._evaluation: Results | None = None
        self._shaped: DataProto | None = None

    def connect(self) -> None:
        config, resume = self._config, self._config.checkpoint.source
        checkpoint = None if resume is None else resumption(resume).checkpoint
        settings = shown_settings(config.model_dump(mode="json"), os.environ)
        del settings["trackers"]
        ids = {} if checkpoint is None else known_tracker_ids(checkpoint)
        built = build_trackers(config.trackers, TrackedRun(self.folder, config.experiment, settings), ids)
        self._trackers = Trackers([*built, self.history], self.console.message)
        if checkpoint is not None and continues_in_folder(config, self.folder):  # for a run that ends before it has resumed
            self._first = self._steps = steps_of(checkpoint)
            with suppress(ValueError):  # a kill may have cut the last line short
                self.history.restore(self.folder / METRICS_FILE)
        self._summarize("running")

    # ---------------------------------------------------------------- a step

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Collect the metrics of step `number` in the block; write them at its end."""
        self._sums = MetricSums()
        self.current, self._shaped, self._work, self._pool_work = number, None, {}, ()
        self._tokens[number] = dict(self._tokens[self._steps])  # if the step is repeated, its tokens count once
        with self.timers.step():
            yield
        self.processes()
        self._write_credit({})  # not written yet if nothing trains
        for label, seconds in self.timers.last.labelled().items():
            self._sums.add("time", seconds, label=label)
        metrics = self._sums.values()
        self._steps = number
        warnings = self.health.new_signs(number, metrics)
        self._note(number, metrics)
        self._report.step_done(number)
        self.console.step(number, metrics)
        for warning in warnings:
            self.console.message(warning, style="yellow")
        spans = [*self.timers.last.spans, *self._rank_spans(), *self._pool_work]
        self._trackers.spans(number, spans)
        rows = [(one.name, round(one.start, 4), round(one.seconds, 4), one.role, one.rank) for one in spans if (one.rank or 0) < MOST_RANKS]
        with (self.folder / SPANS_FILE).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"spans": rows, "step": number}, separators=(",", ":")) + "\n")
        if number % SHOWN_EVERY == 0:
            self._trackers.show_samples(number, "step", self.folder / "samples" / f"step_{number:06d}.jsonl", self._domains)

    def _rank_spans(self) -> Iterator[Span]:
        """Yield the ranks' spans of this step. Parent: the driver's span of the same phase that contains the start, else the step."""
        step, *own = self.timers.last.spans
        for role, ranks in self._work.items():
            for rank, phases in enumerate(ranks):
                for phase, work in phases.items():
                    for start, seconds in work.runs:
                        around = (span.name for span in own if span.name.rpartition("/")[2] == phase and span.holds(start))
                        if step.holds(start):
                            yield Span(f"{role}[{rank}] {phase}", start, seconds, next(around, STEP), role, rank)

    def synced(self, transfer: Pushed | None) -> None:
        add = self._sums.add
        if transfer is not None:
            add("sync/version", transfer.version)
            add("sync/megabytes", transfer.megabytes)
            add("sync/megabytes_per_second", transfer.megabytes / transfer.seconds)
            for phase, seconds in transfer.phases.items():
                add("sync/seconds", seconds, label=phase)
            for name, megabytes in transfer.by_transport.items():
                add("sync/transport_megabytes", megabytes, label=name)
            for name, seconds in transfer.transport_seconds.items():
                add("sync/transport_megabytes_per_second", transfer.by_transport[name] / seconds, label=name)

    def processes(self) -> None:
        try:
            members = member_places()
        except RayError:  # a missing table must not fail the step
            return
        places = [(role, rank, place) for (role, rank), place in sorted(WATCH.places().items())] + members
        if places != self._places:
            self._places = places
            parts = [(role, rank, part) for role, rank, place in places for part in (place, *place.further)]
            table = [{"role": role, "rank": rank, "node": part.address, "pid": part.pid} for role, rank, part in parts]
            write_json(self.folder / PROCESSES_FILE, table)

    @contextmanager
    def paused(self, reason: Exception) -> Iterator[Path]:
        """Announce a pause of the block's duration. Yield the file that the user deletes to continue."""
        file = self.folder / PAUSED_FILE
        write_whole(file, f"{reason}\n")
        self.console.message(f"paused: {reason}\nTo continue all the same, delete {file}; to end the run, press Ctrl-C")
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)
        self.console.message("the run continues")

    def knows_lost(self, engines: Iterable[int]) -> bool:
        return self._lost_engines.issuperset(engines)

    def engines_lost(self, causes: Mapping[int, str], engines: int) -> None:
        """Report newly lost engines. `causes`: {number: cause} of all losses so far. `engines`: number of engines, lost ones included."""
        for number in [number for number in causes if number not in self._lost_engines]:
            self._lost_engines.add(number)
            self._moves["lost"] += 1
            left = f"{engines - len(self._lost_engines)} of {engines} engines are left"
            self.console.message(f"{_engine(number)} is lost: {causes[number].splitlines()[0]}; {left}")

    def engine_restarted(self, number: int, seconds: float, version: int | None) -> None:
        self._lost_engines.discard(number)
        self._moves["returned"] += 1
        weights = "" if version is None else f", with the weights of version {version}"
        self.console.message(f"{_engine(number)} serves again, {seconds:.0f} s after its loss{weights}")

    def engine_joined(self, number: int, engines: int, version: int | None) -> None:
        self._lost_engines.discard(number)
        self._moves["joined"] += 1
        weights = "" if version is None else f" with the weights of version {version}"
        self.console.message(f"{_engine(number)} joins{weights}; {engines} engines now")

    def engine_left(self, number: int, engines: int) -> None:
        self._moves["left"] += 1
        self.console.message(f"{_engine(number)} leaves, since its node is drained; {engines} engines now")

    def rank_lost(self, failure: RankFailed, since: int, reached: int, repeats: str, in_memory: bool) -> None:
        """Report a lost rank. Its role restarts from step `since` (`in_memory`: from a copy in memory) and repeats "steps" or "the updates
        of steps" (`repeats`) up to `reached`, the last complete step. Later records are removed."""
        cause = failure.cause.splitlines()[0]
        with (self.folder / FAILURE_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{failure}\n\n")
        recorded = max(reached, self._steps)  # above `reached` until a service restarts in the state of an earlier step
        self.ledger.write("restart", role=failure.role, rank=failure.rank, cause=cause, step=recorded, since=since)
        cut_after(self.folder, recorded, (UPDATES_FILE, SPANS_FILE), folders=False)
        place = f"{'the copy in memory of ' * in_memory}step {since}" if since else "the start"
        again = f", and repeats {repeats} {since + 1} to {reached}" if reached > since else ""
        self.console.message(
            f"{failure.role} rank {failure.rank}{failure.where} is lost in {failure.phase}: {cause}; {failure.role} starts again from "
            f"{place}{again} (more in {self.folder / FAILURE_FILE})"
        )

    def rank_returned(self, role: str, seconds: float, step: int) -> None:
        self.console.message(f"{role} is back at step {step}, {seconds:.0f} s after its loss")

    def rollouts(
        self,
        rows: DataProto,
        stats: RolloutStats,
        version: int,
        replaced: Mapping[str, Mapping[str, Sequence[str]]],
        silences: Iterable[float] = (),
    ) -> None:
        """Record a batch. `replaced`, `silences`: see `RolloutBatch`."""
        for part, of_domains in replaced.items():
            for name, causes in of_domains.items():
                self._sums.add(f"{part}/workers_replaced", len(causes), label=name)
                if causes:
                    self._print_rarely(f"domains.{name}.{part}", f"{len(causes)} worker(s) died or hung and were replaced: {causes[-1]}")
        add = self._sums.add
        for move, engines in {"lost": 0, **self._moves}.items():
            add(f"rollout/engines_{move}", engines)
        self._moves.clear()
        for seconds in silences:
            add("rollout/engine_silent_seconds", seconds)
        for name, domain in stats.domains.items():
            for metric, value, count in domain.metrics():
                add(metric, value, count, label=name)
            for word in (LOW, HIGH, FUNCTION) if self._config.rollout.filter is not None else ():
                add(f"rollout/filtered_{word}", domain.filtered[word], label=name)
            for term, total in domain.terms.items():
                add("reward/term", total, domain.accepted, label=name, part=term)
            self._tokens[self.current]["prompt"] += domain.prompt_tokens
            self._tokens[self.current]["response"] += domain.response_tokens
        _add_episodes(self._sums, stats, "episode")
        self._tell_failures(stats)
        for domain_name, own in rows.group_by("domain").items():
            self._samples(str(domain_name), own)
        if len(rows):  # otherwise the filter has left no rows
            self._length_quantiles(ALL_DOMAINS, rows.tensor("response_length"))
            staleness = version - rows.tensor("min_version")
            add("rollout/staleness", float(staleness.sum()), len(rows))
            add("rollout/staleness_max", float(staleness.max()))
        add("rollout/generation_seconds", stats.generation_s)
        add("rollout/reward_tail_seconds", stats.reward_tail_s)
        add("rollout/tokens_per_second", stats.response_tokens, stats.wall_s)

    def _tell_failures(self, stats: RolloutStats, of: str = "") -> None:
        for name, domain in stats.domains.items():
            if domain.failures:
                self._print_rarely(f"{of}domain {name}", f"{domain.failed} sample(s) failed for good, {commonest(domain.failures)}")
            if domain.retries:
                attempts = f"{domain.retries.total()} attempt(s) were repeated, {commonest(domain.retries)}"
                self._print_rarely(f"{of}domain {name}", attempts)

    def _print_rarely(self, place: str, text: str) -> None:
        """Print the text on its 1st, 10th, 100th, ... occurrence."""
        key = (place, NUMBER.sub("", text))
        times, first = self._told.get(key, (0, text))
        times += 1
        self._told[key] = times, first
        if str(times).rstrip("0") == "1":
            self.console.message(f"{place}: {text}" + (f" (for the {times}th time)" if times > 1 else ""))

    def _samples(self, domain: str, rows: DataProto) -> None:
        add, scores, lengths = self._sums.add, rows.tensor("score").double(), rows.tensor("response_length")
        add("reward/mean", float(scores.sum()), len(rows), label=domain)
        add("reward/square", float(scores.square().sum()), len(rows), label=domain)
        add("reward/max", float(scores.max()), label=domain)
        add("reward/min", float(scores.min()), label=domain)
        add("reward/accuracy", float(rows.tensor("correct").sum()), len(rows), label=domain)
        groups = rows.group_by("group").values()
        solved = [float(group.tensor("correct").mean()) for group in groups]
        for name, (low, high) in SOLVED.items():
            add(f"solved/{name}", sum(low < share <= high for share in solved), len(groups), label=domain)
        add("rollout/response_length", float(lengths.sum()), len(rows), label=domain)
        add("rollout/response_length_max", float(lengths.max()), label=domain)
        add("rollout/response_length_min", float(lengths.min()), label=domain)
        self._length_quantiles(domain, lengths)
        ends = list(rows.objects("finish_reason"))
        add("rollout/truncated", ends.count(FinishReason.LENGTH), len(rows), label=domain)
        add("rollout/max_turns", ends.count(FinishReason.MAX_TURNS), len(rows), label=domain)

    def _length_quantiles(self, label: str, lengths: torch.Tensor) -> None:
        in_order = lengths.sort().values
        for percent in (50, 95):
            self._sums.add(f"rollout/response_length_p{percent}", float(in_order[nearest_rank(percent, len(in_order)) - 1]), label=label)

    def shaped(self, rows: DataProto, masked: Masked) -> None:
        self._shaped, rows = rows, per_sample(rows)
        self.ledger.masked(self.current, rows, masked)
        add, numbers = self._sums.add, rows.tensor("domain_number")
        for number, name in enumerate(self._domains):
            own = numbers == number
            count = int(own.sum())
            if count:
                add("reward/shaped", float(rows.tensor("reward")[own].double().sum()), count, label=name)
                add("masks/weight", float(masked.weights[own].double().sum()), count, label=name)
                add("masks/samples", float((masked.weights[own] == 0).sum()), count, label=name)
                for cause, samples in masked.causes.items():
                    add(f"masks/{cause}", float(samples[own].sum()), count, label=name)
                different = np.unique(np.stack([rows.tensor("group")[own].double(), rows.tensor("reward")[own].double()]), axis=1)
                _, rewards = np.unique(different[0], return_counts=True)
                add("reward/flat_groups", int((rewards == 1).sum()), len(rewards), label=name)

    def early(self, samples: int) -> None:
        self._sums.add("rollout/early_samples", samples)

    def credit(self, reports: Sequence[CreditReport], kl_coef: float) -> None:
        sums: dict[str, float] = {}
        for report in reports:
            for name, value in report.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            self._sums.add_sums(report.peaks, self._domains)
        self._sums.add_sums(sums, self._domains)
        if kl_coef > 0:
            self._sums.add("credit/kl_coef", kl_coef)
        self._write_credit({number: advantage for report in reports for number, advantage in report.advantages.items()})

    def _write_credit(self, advantages: Mapping[int, float]) -> None:
        """Write the step's credit file (rewards and advantages), a line per row, once. `advantages`: by sample number."""
        rows, self._shaped = self._shaped, None
        if rows is None:
            return
        names = (*CREDIT_NUMBERS, *(["branch"] if "branch" in rows else []))
        columns = [rows.objects("domain").tolist(), *(rows.tensor(name).tolist() for name in names)]
        folder = self.folder / CREDIT_FOLDER
        folder.mkdir(exist_ok=True)
        file = folder / f"step_{self.current:06d}.jsonl"
        with replacing(file, has_other_writers=False) as draft, draft.open("w", encoding="utf-8") as lines:
            for number, *values in zip(rows.tensor("sample").tolist(), *columns, strict=True):
                record = dict(zip(("domain", *names), values, strict=True))
                advantage = advantages.get(number, math.nan)
                known = advantage if math.isfinite(advantage) else None  # JSON has no NaN
                lines.write(json.dumps({"step": self.current, **record, "advantage": known}) + "\n")

    def updates(self, step: int, updates: Mapping[str, Sequence[Sequence[Update]]], kl_coef: float) -> None:
        """Record a step's optimizer updates, {role: [data parallel rank][update]}. Sums, equal on all ranks, are taken from the first;
        peaks are merged."""
        for role, ranks in updates.items():
            for number, update in enumerate(ranks[0]):
                counts = MetricSums()
                counts.add(f"{role}/updates", float(not update.result.skipped))
                counts.add(f"{role}/skipped", float(update.result.skipped))
                counts.add(f"{role}/lr", update.result.lr)
                sums = self._update(role, update, [rank[number].peaks for rank in ranks])
                sums.merge(counts)
                finite = {name: value for name, value in sums.values().items() if math.isfinite(value)}  # JSON has no NaN or infinity
                record = {"step": step, "role": role, "update": number + 1, "epoch": update.epoch + 1, **finite}
                with (self.folder / UPDATES_FILE).open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(record) + "\n")
                self._sums.merge(counts if update.result.skipped else sums)
        if updates.get("actor") and updates["actor"][0]:
            self._ratios([update for rank in updates["actor"] for update in rank if not update.result.skipped])
            sums_of = [update.result.metrics for update in updates["actor"][0] if not update.result.skipped]
            self._tokens[self.current]["trained"] += int(
                sum(value for sums in sums_of for name, value in sums.items() if name.startswith("actor/tokens#"))
            )
        if kl_coef > 0:
            self._sums.add("actor/kl_coef", kl_coef)

    def skipped(self, first: Skipped) -> None:
        self.console.message(
            f"step {first.step}: update {first.update} of the {first.role} was skipped, its loss is {first.loss:.4g} and its gradient norm "
            f"{first.grad_norm:.4g}; its samples are in {self.folder / first.folder}"
        )

    def worked(self, by_role: Mapping[str, Sequence[RankWork]]) -> None:
        self._work, add = by_role, self._sums.add
        for role, ranks in by_role.items():
            for phase in dict.fromkeys(phase for rank in ranks for phase in rank):
                done = [rank[phase] for rank in ranks if phase in rank]
                for one in done:
                    if one.seconds > 0:  # engines do not measure it
                        add("ranks/slowest_seconds", one.seconds, label=f"{role}/{phase}")
                        add("ranks/fastest_seconds", one.seconds, label=f"{role}/{phase}")
                    self._memory(role, phase, one.memory)
                    for kind, size in one.moved.items():
                        add(f"offload/{kind}_megabytes", size / 1e6, label=role)
                if phase == "log_probs":
                    self._speed("log_probs", role, done)
                elif phase == "train":
                    self._speed(role.removesuffix("_train"), None, done)

    def pools_worked(self, spans: Sequence[Span], memory: Mapping[str, PeaksByPhase]) -> None:
        """Record a batch's work and GPU memory of pools."""
        self._pool_work = spans
        for role, of_role in memory.items():
            for phase, peaks in of_role.items():
                self._memory(role, phase, peaks)

    def _memory(self, role: str, phase: str, peaks: Mapping[str, int]) -> None:
        for kind, size in peaks.items():
            self._sums.add(f"memory/{kind}_megabytes", size / 1e6, label=f"{role}/{phase}")

    def _speed(self, family: str, label: str | None, done: Sequence[PhaseWork]) -> None:
        device_seconds = len(done) * max(one.seconds for one in done)
        teraflops = sum(one.flops for one in done) / 1e12
        totals = {"tokens_per_second": sum(one.tokens for one in done), "tflops": teraflops}
        peak = self._config.profile.peak_tflops or (done[0].peak_tflops if self._config.model.dtype == "bfloat16" else None)
        if peak is not None:
            totals["mfu"] = teraflops / peak
        for name, total in totals.items():
            self._sums.add(f"{family}/{name}", total, device_seconds, label=label)

    def _update(self, role: str, update: Update, peaks: Sequence[Mapping[str, float]]) -> MetricSums:
        sums = MetricSums()
        sums.add_sums(update.result.metrics, self._domains)
        if not update.result.skipped:
            sums.add(f"{role}/grad_norm", update.result.grad_norm)
        if (experts := update.result.experts) is not None:
            sums.add(f"{role}/busiest_expert", experts.busiest)
            if experts.balance_loss is not None:
                sums.add(f"{role}/balance_loss", experts.balance_loss)
            if experts.rerouted is not None:
                sums.add(f"{role}/rerouted", experts.rerouted)
        for of_rank in peaks:
            sums.add_sums(of_rank, self._domains)
        return sums

    def _ratios(self, updates: Sequence[Update]) -> None:
        counts = [update.ratios for update in updates if update.ratios is not None]
        if not counts:
            return
        by_domain = np.sum(counts, axis=0)
        for label, own in [*zip(self._domains, by_domain, strict=True), (ALL_DOMAINS, by_domain.sum(0))]:
            for name, value in zip(("p01", "p50", "p99"), ratio_percentiles(own, (1, 50, 99)), strict=True):
                if value == value:
                    self._sums.add(f"actor/ratio_{name}", value, label=label)

    # ---------------------------------------------------------------- around the steps

    def resumed(self, step: int, checkpoint: Path | None) -> None:
        self._first = step
        if continues_in_folder(self._config, self.folder):
            self.go_back(step)
        self._steps = step
        self.console.message(f"resumed after step {step} from {checkpoint}")

    def go_back(self, step: int) -> None:
        """Remove what the run repeats: records of steps after `step`, and the validation of `step` if it is due."""
        self._steps = step
        is_due = validates(self._config) and validation_is_due(self._config, step)
        cut_after(self.folder, step, (METRICS_FILE, UPDATES_FILE, SPANS_FILE), validation=is_due)
        self.history.restore(self.folder / METRICS_FILE)
        self._trackers.repeat(step + 1)

    def validation(self, step: int, rows: DataProto, stats: RolloutStats) -> None:
        sums = held_out_metrics(rows, self._config.validation.samples_per_prompt)
        for name, domain in stats.domains.items():
            sums.add("validation/failed", domain.failed, label=name)
        _add_episodes(sums, stats, "validation")
        self._tell_failures(stats, "validation: ")
        if len(rows):
            sums.add("validation/version_min", float(rows.tensor("min_version").min()))
            sums.add("validation/version_max", float(rows.tensor("max_version").max()))
        sums.add("validation/seconds", stats.wall_s)
        sums.add("validation/tokens_per_second", stats.response_tokens / max(stats.wall_s, 1e-9))
        metrics = sums.values()
        self._note(step, metrics)
        if self._config.mode == "evaluate":
            self._evaluation = write_evaluation(self.folder, self._config.model.path, metrics)
        else:
            self.console.validation(step, metrics)
        self._trackers.show_samples(step, "validation", self.folder / "samples" / f"validation_{step:06d}.jsonl", self._domains)

    def close(self, exit_state: str) -> None:
        try:
            change = self._summarize(exit_state)
            self._picture.close()
            self._report.close()
            try:
                self._draw()
                if (curves := self.folder / CURVES_FILE).exists():  # not before the first metrics
                    self._trackers.picture(curves)
                from roll_lite.observability.view.report import write_report  # DuckDB and pyarrow, which only this needs

                write_report(self.folder)
            except Exception as error:  # the run is complete without them
                self.console.message(f"{CURVES_FILE} and report.html cannot be written: {type(error).__name__}: {error}")
            if self._evaluation is None:
                self.console.finish(change, self.health.findings.values())
            else:
                self.console.evaluation(self._evaluation)
            for (place, _), (times, first) in self._told.items():
                if times > 1:
                    self.console.message(f"{place}: {times} times as the first time: {first}")
            steps = self._steps if self._evaluation is None else None
            self.console.closing_line(steps, self._first, self.timers.wall()["total"], self.folder)
        finally:
            self._trackers.close(exit_state)

    # ---------------------------------------------------------------- summary and picture

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackers.log(step, metrics)
        self._summarize("running")
        self._picture.changed()

    def _summarize(self, exit_state: str) -> Measures:
        validated = [record for _, record in sorted(self.history.records.items()) if "validation/accuracy" in record]
        last = validated[-1] if len(validated) > 1 else {}
        first = validated[0] if validated else {}
        change = held_out_change(first, last)
        write_summary(
            self.folder,
            domains=self._domains,
            validation=change,
            steps=self._steps,
            resumed_after=self._first,
            wall_s=self.timers.wall(),
            tokens=self._tokens[self._steps],
            findings=self.health.findings.values(),
            exit_state=exit_state,
        )
        return change

    def _draw(self) -> None:
        draw_curves(
            self.folder / CURVES_FILE,
            dict(self.history.records),
            self._domains,
            self._config.experiment,
            [one.sign for one in self.health.findings.values()],
        )


def _engine(number: int) -> str:
    return f"actor_infer[{number}]{WATCH.where('actor_infer', number)}"


def _add_episodes(sums: MetricSums, stats: RolloutStats, prefix: str) -> None:
    for name, domain in stats.domains.items():
        for fact, total in domain.of_episodes.items():
            metric, part = (fact, "") if f"episode/{fact}" in EPISODES else ("metric", fact)
            sums.add(f"{prefix}/{metric}", total, domain.episodes, label=name, part=part)


def held_out_metrics(rows: DataProto, samples_per_prompt: int) -> MetricSums:
    """Return validation metrics by domain and by value of its `report_by` columns: means over samples or, for pass@k, best@k and maj@k,
    over prompts with at least k samples."""
    sums = MetricSums()
    for domain, own in rows.group_by("domain").items():
        _held_out_domain(sums, own, samples_per_prompt, str(domain))
    if len(rows):
        error = accuracy_error(rows.tensor("group").numpy(), rows.tensor("correct").double().numpy())
        sums.add("validation/accuracy_error", error, label=ALL_DOMAINS)
    return sums


def _held_out_domain(sums: MetricSums, rows: DataProto, samples_per_prompt: int, domain: str) -> None:
    correct, scores = rows.tensor("correct").double().numpy(), rows.tensor("score").double().numpy()
    lengths, ends = rows.tensor("response_length").double().numpy(), rows.objects("finish_reason")
    means = {"accuracy": correct, "reward": scores, "response_tokens": lengths}
    means |= {"truncated": ends == FinishReason.LENGTH, "max_turns": ends == FinishReason.MAX_TURNS}
    prompts = rows.tensor("group").numpy()
    sampled = SampledPrompts(prompts, correct, scores, rows.tensor("answer").numpy())
    worths = {f"{name}@{k}": of(sampled, k) for k in every_k(samples_per_prompt) for name, of in AT_K.items()}
    parts: dict[str, list[int]] = {"": list(range(len(rows)))}
    for row, names in enumerate(rows.objects("parts")):
        for name in names:
            parts.setdefault(name, []).append(row)
    for name, own in sorted(parts.items(), key=lambda one: re.sub(r"\d+", lambda number: number[0].zfill(9), one[0])):  # 2 before 10
        of_samples = np.zeros(len(rows), dtype=bool)
        of_samples[own] = True
        of_prompts = of_samples[sampled.first]
        sums.add("validation/prompts", int(of_prompts.sum()), label=domain, part=name)
        sums.add("validation/samples", len(own), label=domain, part=name)
        sums.add("validation/accuracy_error", accuracy_error(prompts[own], correct[own]), label=domain, part=name)
        measured = {metric: values[of_samples] for metric, values in means.items()}
        measured |= {metric: values[of_prompts & ~np.isnan(values)] for metric, values in worths.items()}
        for metric, values in measured.items():
            if len(values):
                sums.add(f"validation/{metric}", float(values.sum()), len(values), label=domain, part=name)
