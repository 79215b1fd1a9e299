"""What a run says of itself, from what its parts report."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll_lite.algorithms.advantages import grpo
from roll_lite.algorithms.rewards import Masked
from roll_lite.algorithms.token_metrics import BINS
from roll_lite.config.loading import load_config
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.samples import Prompt, Sample, SampleGroup, SampleId, SampleOutcome, Score, Transcript
from roll_lite.distributed.dataflow import Batch
from roll_lite.distributed.place import Place
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.observability.timers import Span
from roll_lite.observability.trackers import TrackedRun
from roll_lite.pipeline import journal as module
from roll_lite.pipeline.journal import SOLVED, Journal
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.scheduler.stats import DomainStats, Recorder, RolloutStats
from roll_lite.workers.actor import CreditReport
from roll_lite.workers.model import Update
from roll_lite.workers.phases import PhaseWork
from roll_lite.workers.rollout_output import rows_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.chdir(ROOT)
    journal = Journal(load_config("tiny_grpo", ROOT / "examples/configs", ["trackers=[{name: jsonl}]"]), tmp_path)
    journal.connect()
    return journal


def test_trackers_get_the_settings_without_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[TrackedRun] = []
    monkeypatch.setattr("roll_lite.pipeline.journal.build_trackers", lambda _, run, ids: given.append(run) or [])
    Journal(load_config("tiny_grpo", ROOT / "examples/configs", ["seed=5"]), tmp_path).connect()
    assert given[0].settings["seed"] == 5 and "trackers" not in given[0].settings


def update(mismatch: float, tokens: tuple[int, int, int] = (10, 0, 30), epoch: int = 0) -> Update:
    sums = {"actor/loss": 0.5, "actor/policy_loss": 0.5}
    for number, count in enumerate(tokens):
        sums |= {
            f"actor/tokens#{number}": float(count),
            f"actor/ratio#{number}": 1.0 * count,
            f"actor/ratio_square#{number}": 2.0 * count,
            f"mismatch/mean#{number}": mismatch * count,
        }
    ratios = np.zeros((3, BINS), dtype=np.int64)
    ratios[0, BINS // 2] = tokens[0]
    ratios[2, -1] = tokens[2]
    return Update(epoch, TrainResult(sums, 0.5, 1.0, 1e-3), {"mismatch/max#0": mismatch}, ratios)


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_sums_by_domain_are_read_by_domain_and_overall(journal: Journal, tmp_path: Path) -> None:
    with journal.step(1):
        journal.updates(1, {"actor": [[update(0.1)], [update(0.1)]]}, kl_coef=0.0)
    journal.close("completed")
    (record,) = records(tmp_path)
    assert record["actor/tokens"] == 40 and record["domain/repeat/actor/tokens"] == 30
    assert record["domain/add/actor/ess"] == pytest.approx(0.5)
    assert "domain/make/actor/ratio" not in record, "a domain without tokens has no mean"
    assert record["domain/add/actor/ratio_p99"] == pytest.approx(1.0)
    assert record["actor/ratio_p01"] == pytest.approx(1.0) and record["actor/ratio_p99"] > 1e6


def test_signs_of_a_run_that_learns_nothing_are_on_the_console_and_in_the_summary(
    journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(1, 5):
        with journal.step(step):
            journal.updates(step, {"actor": [[replace(update(0.1), result=replace(update(0.1).result, grad_norm=0.0))]]}, kl_coef=0.0)
    journal.close("completed")
    told = [line for line in capsys.readouterr().out.splitlines() if "its weights do not change" in line]
    assert [line.split(":")[0] for line in told] == ["warning, step 3", "warning, 4 step(s) from step 1 on"]
    (warning,) = json.loads((tmp_path / "summary.json").read_text())["warnings"]
    assert (warning["sign"], warning["first_step"], warning["steps"]) == ("no_gradient", 1, 4)


def test_what_was_moved_is_told_by_role(journal: Journal, tmp_path: Path) -> None:
    def moved(seconds: float, size: int) -> dict[str, PhaseWork]:
        load = PhaseWork(None, seconds / 2, moved=Counter({"in": size // 6}))
        return {"load": load, "offload": PhaseWork(None, seconds, moved=Counter({"freed": size, "out": size // 3 * 2}))}

    with journal.step(1):
        journal.worked({"reference": [moved(0.1, 0)], "actor_train": [moved(0.5, 30_000_000), moved(0.125, 30_000_000)]})
    (record,) = records(tmp_path)
    own = {name.removeprefix("offload/"): value for name, value in record.items() if name.endswith("/actor_train")}
    assert own == {"freed_megabytes/actor_train": 60, "out_megabytes/actor_train": 40, "in_megabytes/actor_train": 10}
    assert record["ranks/slowest_seconds/actor_train/offload"] == 0.5 and record["ranks/slowest_seconds/actor_train/load"] == 0.25
    assert record["offload/freed_megabytes/reference"] == 0


def worked(journal: Journal, tmp_path: Path, device: str | None) -> dict[str, float]:
    """Record of two actor ranks with 6e12 FLOPs each, of which the slower one took 3 seconds, and of a reference."""
    ranks = [
        {"train": PhaseWork(device, seconds, [(100.0, seconds)], tokens=600, flops=6e12, memory={"resident": size})}
        for seconds, size in ((2.0, 5_000_000), (3.0, 4_000_000))
    ]
    reference = {"log_probs": PhaseWork(device, 0.5, tokens=100, flops=1e12, memory={"resident": 1_000_000})}
    with journal.step(1):
        journal.worked({"actor_train": ranks, "reference": [reference]})
    return records(tmp_path)[-1]


def test_speed_is_that_of_the_slowest_rank(journal: Journal, tmp_path: Path) -> None:
    """12e12 FLOPs and 1,200 tokens by 2 devices in 3 seconds. A CPU has no known peak."""
    record = worked(journal, tmp_path, device=None)
    assert (record["actor/tflops"], record["actor/tokens_per_second"]) == (2.0, 200.0)
    assert (record["log_probs/tflops/reference"], record["log_probs/tokens_per_second/reference"]) == (2.0, 200.0)
    assert (record["memory/resident_megabytes/actor_train/train"], record["memory/resident_megabytes/reference/log_probs"]) == (5.0, 1.0)
    assert (record["ranks/slowest_seconds/actor_train/train"], record["ranks/fastest_seconds/actor_train/train"]) == (3.0, 2.0)
    assert not [name for name in record if "mfu" in name or "allocated" in name]


def test_memory_of_engines_and_reward_models_is_told_by_phase(journal: Journal, tmp_path: Path) -> None:
    """Of the fullest engine. Engines measure no time of their own."""
    engines = [{"generate": PhaseWork(None, memory={"device": size, "reserved": 7_000_000})} for size in (3_000_000, 4_000_000)]
    with journal.step(1):
        journal.pools_worked([], {"reward_models.toy": {"score": {"allocated": 2_000_000}}})
        journal.worked({"actor_infer": engines})
    (record,) = records(tmp_path)
    assert {name: value for name, value in record.items() if name.startswith(("memory/", "ranks/"))} == {
        "memory/device_megabytes/actor_infer/generate": 4.0,
        "memory/reserved_megabytes/actor_infer/generate": 7.0,
        "memory/allocated_megabytes/reward_models.toy/score": 2.0,
    }


def test_trackers_get_spans_and_some_samples(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step the driver's phases and within them those of ranks, not those before the step. Samples of every tenth step."""
    spans: list[Span] = []
    files: list[Path] = []
    monkeypatch.setattr(journal._trackers, "spans", lambda step, got: spans.extend(got))
    monkeypatch.setattr(journal._trackers, "show_samples", lambda step, kind, file, domains: files.append(file))
    with journal.step(9), journal.timers.phase("learn"):
        outside = time.time()
        time.sleep(0.002)
        with journal.timers.phase("train"):
            now = time.time()
            journal.worked({"critic": [{"train": PhaseWork(None, 2.0, [(outside - 9, 0.5), (outside, 0.5), (now, 1.5)])}]})
        journal.pools_worked([Span("judges.grader[0] score", now, 0.5, "step", "judges.grader", 0)], {})
    assert [(span.name, span.parent) for span in spans] == [
        *(("step", ""), ("learn", "step"), ("learn/train", "learn")),
        *(("critic[0] train", "step"), ("critic[0] train", "learn/train"), ("judges.grader[0] score", "step")),
    ]
    assert [(span.start, span.seconds, span.role, span.rank) for span in spans[4:]] == [
        (now, 1.5, "critic", 0),
        (now, 0.5, "judges.grader", 0),
    ]
    (written,) = map(json.loads, (journal.folder / "spans.jsonl").read_text().splitlines())
    assert written["step"] == 9 and [row[0] for row in written["spans"]] == [span.name for span in spans]
    assert written["spans"][4] == [spans[4].name, pytest.approx(now, abs=1e-3), 1.5, "critic", 0]
    assert spans[0].start <= spans[1].start <= time.time() and files == []
    with journal.step(10):
        pass
    assert files == [journal.folder / "samples" / "step_000010.jsonl"]


@pytest.mark.parametrize(
    ("settings", "mfu"),
    [
        (["model.dtype=bfloat16"], 2 / 989),
        (["model.dtype=float32"], None),
        (["model.dtype=float32", "profile.peak_tflops=8"], 0.25),
    ],
)
def test_mfu_needs_a_peak(settings: list[str], mfu: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known peaks are those of bfloat16."""
    monkeypatch.chdir(ROOT)
    journal = Journal(load_config("tiny_grpo", ROOT / "examples/configs", ["trackers=[{name: jsonl}]", *settings]), tmp_path)
    journal.connect()
    record = worked(journal, tmp_path, "NVIDIA H100 80GB HBM3")
    assert (record.get("actor/mfu"), record.get("log_probs/mfu/reference")) == (pytest.approx(mfu), pytest.approx(mfu))


def test_why_samples_failed_is_told_in_a_line_for_each_domain(journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without dumps it stands nowhere else."""
    died = "generation: CUDA error\n  at line 7"
    stats = RolloutStats({name: DomainStats() for name in ("add", "make", "repeat")}, wall_s=1.0)
    stats.domains["add"] = DomainStats(failed=4, failures=Counter({died: 3, "out of cache": 1}), retries=Counter({died: 7, "x" * 999: 2}))
    stats.domains["make"].retries["the judge is away"] += 2
    with journal.step(1):
        journal.rollouts(rows_of([], {}), stats, 0, {})
    journal.validation(1, rows_of([], {}), stats)
    lines = [line for line in capsys.readouterr().out.splitlines() if "domain " in line]
    told = [
        "domain add: 4 sample(s) failed for good, 3 of them: generation: CUDA error at line 7",
        "domain add: 9 attempt(s) were repeated, 7 of them: generation: CUDA error at line 7",
        "domain make: 2 attempt(s) were repeated, 2 of them: the judge is away",
    ]
    assert lines == [*told, *(f"validation: {line}" for line in told)]


def test_a_failure_of_every_step_is_told_once_and_counted(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(cause: str, count: int) -> RolloutStats:
        stats = RolloutStats({name: DomainStats() for name in ("add", "make", "repeat")}, wall_s=1.0)
        stats.domains["make"].failed, stats.domains["make"].failures = count, Counter({cause: count})
        return stats

    for step in range(1, 13):
        with journal.step(step):
            journal.rollouts(
                rows_of([], {}),
                failing("the judge is away" if step == 5 else f"no answer of {step}ab{step:x} in 1.{step} s", step),
                0,
                {"reward": {"add": ["its process died", "reward exact on 10.0.0.2: its process died"]}},
            )
    journal.close("completed")
    replaced = "domains.add.reward: 2 worker(s) died or hung and were replaced: reward exact on 10.0.0.2: its process died"
    late = "sample(s) failed for good, {0} of them: no answer of {0}ab{0:x} in 1.{0} s"
    assert [line for line in capsys.readouterr().out.splitlines() if "failed for good" in line or "replaced" in line] == [
        replaced,
        f"domain make: 1 {late.format(1)}",
        "domain make: 5 sample(s) failed for good, 5 of them: the judge is away",
        f"{replaced} (for the 10th time)",
        f"domain make: 11 {late.format(11)} (for the 10th time)",
        replaced.replace(": 2", ": 12 times as the first time: 2"),
        f"domain make: 11 times as the first time: 1 {late.format(1)}",
    ]


def test_the_table_of_processes_has_all_nodes_of_an_engine(journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Place("a", 7, "10.0.0.1", further=(Place("b", 8, "10.0.0.2"), Place("c", 9, "10.0.0.3")))
    monkeypatch.setattr("roll_lite.pipeline.journal.WATCH", SimpleNamespace(places=lambda: {("actor_infer", 0): engine}))
    journal.processes()
    table = json.loads((tmp_path / "processes.json").read_text())
    assert [(one["role"], one["rank"], one["node"], one["pid"]) for one in table] == [
        ("actor_infer", 0, f"10.0.0.{number}", 6 + number) for number in (1, 2, 3)
    ]


def test_every_update_leaves_a_line(journal: Journal, tmp_path: Path) -> None:
    with journal.step(3):
        journal.updates(3, {"actor": [[update(0.1), update(0.1, epoch=1)]]}, kl_coef=0.2)
    journal.close("completed")
    lines = records(tmp_path, "updates.jsonl")
    assert [(line["step"], line["role"], line["update"], line["epoch"]) for line in lines] == [(3, "actor", 1, 1), (3, "actor", 2, 2)]
    assert all(line["actor/grad_norm"] == 1.0 for line in lines)
    (record,) = records(tmp_path)
    assert record["actor/updates"] == 2 and record["actor/kl_coef"] == 0.2


def test_an_update_that_was_skipped_is_counted_and_spoils_nothing_of_the_step(journal: Journal, tmp_path: Path) -> None:
    finite, skipped = update(0.1), update(math.nan)
    sums = {**skipped.result.metrics, "actor/loss": math.inf}
    skipped = replace(skipped, result=replace(skipped.result, metrics=sums, loss=math.inf, grad_norm=math.nan, skipped=True))
    with journal.step(1):
        journal.updates(1, {"actor": [[finite, skipped]]}, kl_coef=0.0)
    journal.close("completed")
    (record,) = records(tmp_path)
    assert (record["actor/updates"], record["actor/skipped"], record["actor/tokens"], record["actor/loss"]) == (1, 1, 40, 0.5)
    assert record["mismatch/mean"] == pytest.approx(0.1) and record["actor/ratio_p01"] == pytest.approx(1.0)
    assert json.loads((tmp_path / "summary.json").read_text())["tokens"]["trained"] == 40
    text = (tmp_path / "updates.jsonl").read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert json.loads(text.splitlines()[1])["actor/skipped"] == 1


@pytest.mark.parametrize("correct", range(9))
def test_every_solve_rate_falls_into_one_bin(correct: int) -> None:
    share = correct / 8
    bins = [name for name, (low, high) in SOLVED.items() if low < share <= high]
    names = {0: "none", 1: "quarter", 2: "quarter", 3: "half", 4: "half", 5: "three_quarters", 6: "three_quarters", 7: "most", 8: "all"}
    assert bins == [names[correct]]
    assert not math.isnan(share)


def test_flat_groups_are_those_without_advantage_under_grpo(journal: Journal, tmp_path: Path) -> None:
    """By the rewards that shaping made of equal or different scores; two domains."""
    rewards = torch.tensor([1.0, 0.5, 0.25, 0.25, 1.0, 1.0, 0.0])
    groups, domains = torch.tensor([4, 4, 9, 9, 2, 2, 7]), torch.tensor([0, 0, 0, 0, 2, 2, 2])
    whole = dict.fromkeys(("sample", "index", "prompt_uid", "epoch", "policy_tokens"), torch.arange(7))
    rows = DataProto(
        {"reward": rewards, "group": groups, "domain_number": domains, "score": torch.ones(7), "train_weight": torch.ones(7), **whole}
    )
    rows = rows.with_columns(domain=object_column(["add"] * 4 + ["repeat"] * 3))
    with journal.step(1):
        journal.shaped(rows, Masked(torch.ones(7), {}))
    (record,) = records(tmp_path)
    shares = [record[name] for name in ("domain/add/reward/flat_groups", "domain/repeat/reward/flat_groups", "reward/flat_groups")]
    assert shares == [0.5, 1.0, 0.75]
    same = grpo(rewards, groups, normalize_std=True) == 0
    assert same.tolist() == [False, False, True, True, True, True, True]


def test_every_row_is_written_with_its_reward_and_advantage(journal: Journal, tmp_path: Path) -> None:
    """Beside its line in samples/, by group and index; rows that were left out before credit have no advantage."""
    numbers = {
        "prompt_uid": [5, 5, 6],
        "epoch": [0, 0, 1],
        "policy_tokens": [3, 4, 5],
        "group": [7, 7, 3],
        "index": [0, 2, 0],
        "sample": [0, 1, 2],
    }
    rows = DataProto(
        {
            **{name: torch.tensor(values) for name, values in numbers.items()},
            "score": torch.tensor([1.0, 0.0, 1.0]),
            "reward": torch.tensor([0.75, -0.25, 1.0]),
            "train_weight": torch.tensor([1.0, 0.5, 0.0]),
            "domain": object_column(["add", "add", "repeat"]),
            "domain_number": torch.tensor([0, 0, 2]),
        }
    )
    report = CreditReport(None, {}, {}, {1: -0.5, 0: 0.5, 2: float("nan")})  # type: ignore[arg-type]
    with journal.step(4):
        journal.shaped(rows, Masked(rows.tensor("train_weight"), {}))
        journal.credit([report], 0.0)
    with journal.step(5):
        journal.shaped(rows, Masked(rows.tensor("train_weight"), {}))
    first, second, third = records(tmp_path, "credit/step_000004.jsonl")
    assert first == {
        "step": 4, "domain": "add", "group": 7, "index": 0, "prompt_uid": 5, "epoch": 0,
        "score": 1.0, "reward": 0.75, "train_weight": 1.0, "policy_tokens": 3, "advantage": 0.5,
    }  # fmt: skip
    assert (second["index"], second["advantage"], third["group"], third["advantage"]) == (2, -0.5, 3, None)
    assert [line["advantage"] for line in records(tmp_path, "credit/step_000005.jsonl")] == [None] * 3, "where nothing trains"


def test_every_row_of_an_agents_sample_is_written_and_metrics_count_samples(journal: Journal, tmp_path: Path) -> None:
    """The step's own way from a batch to the journal. The first of four samples has two rows; the second group's mean of 1 masks it."""
    numbers = {
        "sample": [0, 1, 2, 3, 4],
        "group": [7, 7, 7, 3, 3],
        "index": [0, 0, 1, 0, 1],
        "branch": [0, 1, 0, 0, 0],
        "prompt_uid": [5, 5, 5, 6, 6],
        "epoch": [0] * 5,
        "policy_tokens": [3, 6, 4, 5, 5],
        "response_length": [3, 9, 4, 5, 5],
        "min_version": [1] * 5,
        "max_version": [1] * 5,
    }
    rows = {name: torch.tensor(values) for name, values in numbers.items()}
    rows |= {"score": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), "format_ok": torch.zeros(5), "sample_weight": torch.ones(5)}
    rows |= {"correct": rows["score"], "domain": object_column(["add"] * 5), "finish_reason": object_column(["stop"] * 5)}
    config = load_config("tiny_grpo", ROOT / "examples/configs", ["algorithm.masks.group_mean=[0.4,0.6]"])
    pipeline = RLVRPipeline(config, None, None, journal, None, None)  # type: ignore[arg-type]
    with journal.step(1):
        trained = pipeline.shape_rewards(Batch(DataProto(rows)))
        journal.credit([CreditReport(None, {}, {}, {0: 0.5, 1: 0.25, 2: -0.5})], 0.0)  # type: ignore[arg-type]
    assert trained.rows.tensor("sample").tolist() == [0, 1, 2]
    lines = records(tmp_path, "credit/step_000001.jsonl")
    told = [[line[name] for name in ("group", "index", "branch", "policy_tokens", "train_weight", "advantage")] for line in lines]
    assert told == [[7, 0, 0, 3, 1, 0.5], [7, 0, 1, 6, 1, 0.25], [7, 1, 0, 4, 1, -0.5], [3, 0, 0, 5, 0, None], [3, 1, 0, 5, 0, None]]
    (record,) = records(tmp_path)
    assert (record["reward/shaped"], record["masks/samples"], record["masks/group_mean"]) == (0.75, 0.5, 0.5)


def test_terms_of_a_reward_are_told_beside_the_sum(journal: Journal, tmp_path: Path) -> None:
    stats = RolloutStats({name: DomainStats() for name in ("add", "make", "repeat")}, wall_s=1.0)
    recorder = Recorder(["add"], 0.0)
    for values in ((1.0, -0.5), (0.0, -0.25)):
        score = Score(sum(values), terms={"base": values[0], "length": values[1]})
        sample = Sample(SampleId("add", 0, 0, 7, 0), Prompt("add", 0, "", ()), Transcript(), SampleOutcome.ACCEPTED, score)
        recorder.delivered(SampleGroup(7, "add", (sample,)))
    stats.domains["add"] = recorder.domains["add"]
    with journal.step(1):
        journal.rollouts(rows_of([], {}), stats, 0, {})
    (record,) = records(tmp_path)
    assert (record["domain/add/base/reward/term"], record["domain/add/length/reward/term"]) == (0.5, -0.375)


def test_samples_that_a_limit_ended_are_counted_by_limit(journal: Journal, tmp_path: Path) -> None:
    reasons = object_column(["stop", "length", "max_turns", "max_turns"])
    numbers = dict.fromkeys(("response_length", "group"), torch.arange(4)) | dict.fromkeys(("score", "correct"), torch.ones(4))
    with journal.step(1):
        journal._samples("add", DataProto({**numbers, "finish_reason": reasons}))
    (record,) = records(tmp_path)
    assert (record["domain/add/rollout/truncated"], record["domain/add/rollout/max_turns"]) == (0.25, 0.5)


def test_a_length_of_nearest_rank_is_one_that_occurs(journal: Journal, tmp_path: Path) -> None:
    """Of 1 to 20 and 100: the 11th is the median, the 20th is that of 95%. Linear interpolation would say 20 for it, and of 1 to 20
    alone 10.5 and 19.05."""
    with journal.step(1):
        journal._length_quantiles("add", torch.arange(1, 21))
        journal._length_quantiles("make", torch.tensor([*range(20, 0, -1), 100]))
    (record,) = records(tmp_path)
    found = [record[f"domain/{name}/rollout/response_length_{p}"] for name in ("add", "make") for p in ("p50", "p95")]
    assert found == [10, 19, 11, 20]


def test_the_folder_shows_how_far_the_run_is(journal: Journal, tmp_path: Path) -> None:
    def shown() -> tuple[str, int]:
        summary = json.loads((tmp_path / "summary.json").read_text())
        return summary["exit"], summary["steps"]

    assert shown() == ("running", 0)
    with journal.step(1):
        journal.updates(1, {"actor": [[update(0.1)]]}, kl_coef=0.0)
        assert shown() == ("running", 0)
    assert shown() == ("running", 1)
    journal.close("failed: something")
    assert shown() == ("failed: something", 1)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_that_joined_is_told_when_it_is_lost_again(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        journal.engines_lost({2: "its process died"}, 3)
        journal.engine_joined(2, 3, 7)
    assert capsys.readouterr().out.count("actor_infer[2] is lost: its process died; 2 of 3 engines are left") == 2


def test_a_run_that_ends_before_it_has_resumed_keeps_its_steps_in_the_summary(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        with journal.step(number):
            journal._note(number, {"validation/accuracy": 0.5})
    checkpoint = tmp_path / "checkpoints/step_000002"
    settings = journal._config.checkpoint.model_copy(update={"resume": checkpoint})
    monkeypatch.setattr(module, "resumption", lambda folder: SimpleNamespace(checkpoint=folder))
    monkeypatch.setattr(module, "continues_in_folder", lambda *_: True)
    again = Journal(journal._config.model_copy(update={"checkpoint": settings}), tmp_path)
    again.connect()
    again.close("failed: out of memory")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["accuracy"]["overall"]["after"], summary["exit"]) == (2, 0.5, "failed: out of memory")


@pytest.mark.parametrize("trackers", ["[{name: jsonl}]", "[]"])
def test_a_run_that_goes_back_forgets_later_steps_and_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trackers: str) -> None:
    monkeypatch.chdir(ROOT)
    journal = Journal(load_config("tiny_grpo", ROOT / "examples/configs", [f"trackers={trackers}"]), tmp_path)
    journal.connect()

    def step(number: int) -> None:
        with journal.step(number):
            stats = RolloutStats({name: DomainStats(prompt_tokens=1, response_tokens=2) for name in ("add", "make", "repeat")}, wall_s=1.0)
            journal.rollouts(rows_of([], {}), stats, 0, {})
            journal.updates(number, {"actor": [[update(0.1)]]}, kl_coef=0.0)

    def tokens() -> dict[str, int]:
        found: dict[str, int] = json.loads((tmp_path / "summary.json").read_text())["tokens"]
        return found

    for number in (1, 2, 3):
        step(number)
    for number in (0, 1, 3):
        journal._note(number, {"validation/accuracy": 0.25 * number})
    journal.go_back(1)
    assert sorted(journal.history.records) == [0, 1]
    if (tmp_path / "metrics.jsonl").exists():
        written = {line["step"] for line in records(tmp_path) if "validation/accuracy" in line}
        assert {number for number, record in journal.history.records.items() if "validation/accuracy" in record} == written
    with pytest.raises(ValueError, match="a rank"), journal.step(2):
        journal.updates(2, {"actor": [[update(0.1)]]}, kl_coef=0.0)
        raise ValueError("a rank")
    step(2)
    assert tokens() == {"prompt": 6, "response": 12, "trained": 80}
    journal.close("interrupted")
    assert tokens()["trained"] == 80


@pytest.mark.parametrize(
    ("step", "settings", "kept"),
    [
        (0, "validation.every=0", [0]),
        (0, "validation.every=4", []),
        (2, "steps=2", [0]),
        (2, "steps=9", [0, 2]),
        (2, "validation.enabled=false", [0, 2]),
    ],
)
def test_a_validation_of_the_step_gone_back_to_stays_unless_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, settings: str, kept: list[int]
) -> None:
    """As the one before training, and the last one of a run that is continued with more steps."""
    monkeypatch.chdir(ROOT)
    overrides = ["trackers=[{name: jsonl}]", "validation.every=0", settings]
    journal = Journal(load_config("tiny_grpo", ROOT / "examples/configs", overrides), tmp_path)
    journal.connect()
    (tmp_path / "samples").mkdir()
    for validated in (0, 2):
        journal._note(validated, {"validation/accuracy": 0.5})
        (tmp_path / f"samples/validation_{validated:06d}.jsonl").touch()
    journal.go_back(step)
    assert [record["step"] for record in records(tmp_path)] == sorted(journal.history.records) == kept
    assert sorted(int(file.stem[-6:]) for file in (tmp_path / "samples").iterdir()) == kept


@pytest.mark.parametrize("fails", ["_draw", "_summarize"])
def test_trackers_are_closed_and_the_summary_is_written_whatever_else_fails(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    closed: list[str] = []
    monkeypatch.setattr(journal._trackers, "close", closed.append)
    monkeypatch.setattr(journal, fails, full)
    with pytest.raises(OSError, match="No space left") if fails == "_summarize" else nullcontext():
        journal.close("completed")
    assert closed == ["completed"]
    if fails == "_draw":
        assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "completed"
        assert "curves.png and report.html cannot be written: OSError: No space left" in capsys.readouterr().out
