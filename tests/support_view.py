"""Folders of small runs, in the format that runs write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

DOMAINS = ("add", "make")
ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
CONFIG = {"experiment": "small", "steps": 4, "seed": 7, "model": {"path": "nowhere"}, "domains": {name: {"share": 1} for name in DOMAINS}}


def sample(step: int, domain: str, group: int, index: int, **changes: Any) -> dict[str, Any]:
    correct = index % 2 == 0
    return {
        "step": step,
        "domain": domain,
        "group": group,
        "index": index,
        "prompt_uid": group % 4,
        "epoch": 0,
        "attempt": 0,
        "baseline": False,
        "prompt": f"{step}+{group}=",
        "response": f"Answer {step + group + (not correct)}",
        "answer": str(step + group),
        "score": 1.0 if correct else 0.25,
        "correct": correct,
        "format_ok": None,
        "terms": {"base": float(correct), "length": 0.0},
        "details": {"extracted": str(step + group)},
        "outcome": "accepted",
        "failure": None,
        "finish_reason": "stop" if correct else "length",
        "prompt_tokens": 2,
        "response_tokens": 3 + index,
        "versions": [[0, step - 1], [2, step]],
        "asked_at": 1000.0 * step,
        "generated_at": 1000.0 * step + 1 + index,
        "scored_at": 1000.0 * step + 2 + index,
        "columns": {"level": 3},
        **changes,
    }


def episode(step: int, group: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"sum": "2+2"}}}
    messages = [
        {"role": "user", "content": "How much is 1+1?"},
        {"role": "assistant", "content": "2, in the prompt"},
        {"role": "user", "content": "How much is 2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the tool says 4"},
        {"role": "assistant", "content": "4"},
    ]
    branch = [{"role": "user", "content": "Be a planner."}, {"role": "assistant", "content": "First add them."}]
    record = {"messages": messages, "rewards": [0.0, 1.0], "metrics": {"turns": 2.0}}
    if step != 3:
        return sample(step, "make", group, 2, episode=record)
    record |= {"branches": [branch], "metrics": {"turns": 3.0}}
    return sample(step, "make", group, 2, episode=record, score=0.5, branch_versions=[[[0, 5], [1, 6]]])


def write_step(folder: Path, step: int) -> None:
    """Samples, credits, tokens, ledger and metrics of a step, with two groups of a domain each."""
    name = f"step_{step:06d}"
    groups = {2 * step: "add", 2 * step + 1: "make"}
    samples = [sample(step, domain, group, index) for group, domain in groups.items() for index in range(2)]
    samples.append(episode(step, 2 * step + 1))
    failed = {
        "score": None,
        "correct": None,
        "outcome": "failed",
        "failure": f"reward timed out {ATTACK}",
        "response": f"hello {ATTACK} Ünïcode",
    }
    samples.append(sample(step, "add", 2 * step, 2, **failed))
    lines(folder / "samples" / f"{name}.jsonl", samples)
    trained = [one for one in samples if one["outcome"] == "accepted"]
    keys = ("step", "domain", "group", "index", "prompt_uid", "epoch", "score")
    credits = [
        {**{key: one[key] for key in keys}, "reward": one["score"], "train_weight": 1.0, "advantage": one["index"] - 0.5} for one in trained
    ]
    lines(folder / "credit" / f"{name}.jsonl", credits, separators=(", ", ": "))
    write_batch(folder, step)
    with (folder / "ledger.jsonl").open("a") as file:
        for group, domain in groups.items():
            line = {"event": "group", "group": group, "domain": domain, "turns": [[[1, 0, 0]], [[0, 0, 0]], []], "step": step}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    metrics: dict[str, Any] = {
        "step": step,
        "reward/mean": 0.25 * step,
        "time/generate": 3.0,
        "time/train": 1.0,
        "time/train/actor_train": 0.9,
        "time/step": 4.1,
    }
    for number, domain in enumerate(DOMAINS):
        own = {"reward/mean": 0.2 * step + number, "rollout/samples": 3.0, "rollout/truncated": 0.1 * step, "base/reward/term": 0.1 * step}
        own |= {"rollout/requested": 2.0, "rollout/groups": float(step), "rollout/filtered_low": 5.0 - step, "masks/samples": 0.2}
        metrics |= {f"domain/{domain}/{key}": value for key, value in own.items()}
    began = 1000.0 * step - 0.1
    driver = [("step", began, 4.1, "", None), ("generate", began, 3.0, "", None), ("train", began + 3, 1.0, "", None)]
    ranks = [(f"actor_train[{rank}] train", began + 3.1, 0.5 + 0.1 * rank, "actor_train", rank) for rank in range(2)]
    with (folder / "spans.jsonl").open("a") as file:
        file.write(json.dumps({"spans": [*driver, *ranks], "step": step}, separators=(",", ":")) + "\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def write_batch(folder: Path, step: int) -> None:
    """Tokens of samples 0 and 1 of the first group, each from another rank. In step 3 also of an agent's sample, with two rows, of which
    the second was written first."""
    numbers = {
        "rollout_log_probs": [0.0, -0.5, -1.5],
        "old_log_probs": [0.0, -0.25, -1.5],
        "ref_log_probs": [0.0, -0.75, -1.25],
        "values": [0.0, 0.5, -0.25],
        "advantages": [0.0, 1.0, -1.0],
    }
    tokens = {"prompt_length": 2, "input_ids": [5, 6, 7, 8], "response_mask": [False, False, True, True], **numbers}
    ranks: list[list[dict[str, Any]]] = [[{"group": 2 * step, "index": index, **tokens}] for index in range(2)]
    if step == 3:
        longer = {name: [0.0, *values] for name, values in numbers.items()}
        second = {"prompt_length": 3, "input_ids": [9, 5, 6, 7, 8], "response_mask": [False, False, False, True, True], **longer}
        ranks[0] += [{"group": 7, "index": index, "branch": 1, **second} for index in (1, 2)]
        ranks[1] += [{"group": 7, "index": index, **tokens} for index in (1, 2)]
        ranks = [[{"branch": 0, **row} for row in rows] for rows in ranks]
    batch = folder / "batches" / f"step_{step:06d}"
    batch.mkdir(parents=True)
    for rank, rows in enumerate(ranks):
        pq.write_table(pa.Table.from_pylist(rows), batch / f"rows_{rank:04d}.parquet")


def lines(path: Path, records: list[dict[str, Any]], separators: tuple[str, str] = (",", ":")) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, separators=separators, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def make_run(folder: Path, steps: int = 4, exit_state: str = "completed", **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **settings}))
    for step in range(1, steps + 1):
        write_step(folder, step)
    lines(folder / "samples" / "validation_000000.jsonl", [sample(0, "add", 0, index, parts=[f"level:{index}"]) for index in range(2)])
    accuracy = {"overall": {"before": 0.5, "after": 0.75}}
    (folder / "summary.json").write_text(json.dumps({"accuracy": accuracy, "steps": steps, "warnings": [], "exit": exit_state}))
    (folder / "processes.json").write_text(json.dumps([{"role": "actor_infer", "rank": 1, "node": "here", "pid": 17}]))
    return folder
