"""The ledger: a line for each event, on its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scheduler_support import TimedReward, make_domain, make_service
from support_scripted import Response

from roll_lite.algorithms.rewards import Masked
from roll_lite.config.loading import load_config
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import GenerationRequest, SampleGroup
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.pipeline.ledger import Ledger
from roll_lite.scheduler.domain import DomainFailed
from roll_lite.scheduler.filters import LOW, GroupFilter, LeftOut
from roll_lite.scheduler.supply import Asynchronous, Synchronous
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.model import Update
from roll_lite.workers.rollout_output import ledger_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(ROOT)
    return Ledger(load_config("tiny_dapo", ROOT / "examples/configs"), tmp_path)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def easy(group: SampleGroup) -> LeftOut | None:
    return LeftOut(LOW, "too easy") if group.samples[0].id.prompt_uid % 3 == 0 else None


def ends(lines: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    return {line["group"]: (line["end"], line.get("cause")) for line in lines if line["event"] == "group"}


def test_delivered_filtered_and_failed_groups_have_their_lines() -> None:
    async def main() -> list[dict[str, Any]]:
        rewards = TimedReward(fails=lambda item, asked: item.prompt in ("a 4", "a 7"))
        domain = make_domain("a", prompts=9, samples=2, rewards=rewards, filter=GroupFilter(easy, tries=10), greedy_baseline=True)
        service, _, _ = make_service([domain])
        return (await service.next_batch(4)).ledger

    *groups, batch = run_virtual(main())
    by_prompt = {line["prompt"]: line for line in groups}
    assert len(by_prompt) == len(groups) == batch["admitted"] - len(batch["open"])
    for prompt, line in by_prompt.items():
        if prompt in (4, 7):
            assert (line["end"], line["cause"]) == ("failed", "greedy baseline: the judge is away")
            assert line["failed"] == dict.fromkeys(range(3), "the judge is away") and line["scores"] == [None] * 3
        elif prompt % 3 == 0:
            assert (line["end"], line["cause"], line["scores"]) == ("filtered", "too easy", [1.0] * 3)
        else:
            assert line["end"] == "delivered" and "cause" not in line and line["asked"] == 1
        assert line["baseline"] == 2 and line["turns"] == [[[None, 0, 0]]] * 3 and line["epoch"] == 0
    assert batch["event"] == "batch" and batch["wanted"] == {"a": 4} and batch["shares"] == {"a": 1.0} and batch["version"] == 0
    assert sum(line["end"] == "delivered" for line in groups) == 4


def test_each_admitted_group_has_one_line_and_a_watermark_names_the_others() -> None:
    async def main() -> list[dict[str, Any]]:
        def script(request: GenerationRequest) -> Response:
            return Response(4 + 60 * (request.prompt_ids[1] % 5 == 0), 0.01)

        domains = [make_domain("a", 0, samples=2, filter=GroupFilter(easy, tries=10)), make_domain("b", 1, samples=2)]
        service, _, engines = make_service(domains, [script], supply=Asynchronous(2))
        lines = []
        for step in range(1, 9):
            lines += (await service.next_batch(4)).ledger
            watermark = lines[-1]
            assert sorted([*ends(lines), *watermark["open"]]) == list(range(watermark["admitted"]))
            await service.hold()
            await engines[0].begin_weight_update([])
            await engines[0].receive_bucket([])
            await engines[0].finish_weight_update(step)
            service.set_version(step)
        last = service.last_ledger()
        assert last[-1] == {"event": "end", "admitted": service._next_group, "open": []}
        assert sorted([*ends(lines), *ends(last)]) == list(range(service._next_group))
        assert ("dropped", "the run ended") in ends(last).values()
        return lines

    lines = run_virtual(main())
    assert len(ends(lines)) == sum(line["event"] == "group" for line in lines)
    turns = [turn for line in lines if line["event"] == "group" for turns in line["turns"] for turn in turns]
    assert any(first < last for _, first, last in turns), "some went on with new weights"


def test_stale_groups_have_their_cause_and_their_prompts_come_again() -> None:
    async def main() -> list[dict[str, Any]]:
        service, _, _ = make_service([make_domain("a", samples=2)], supply=Synchronous(0), oversample=2.0)
        return [line for _ in range(3) for line in (await service.next_batch(4)).ledger]

    groups = [line for line in run_virtual(main()) if line["event"] == "group"]
    stale = [line for line in groups if line["end"] == "stale"]
    assert stale and {line["cause"] for line in stale} <= {"surplus", "unfinished"}
    assert all(("turns" in line) == (line["cause"] == "surplus") for line in stale), "a complete group has its turns and scores"
    assert sum(line["prompt"] == stale[0]["prompt"] for line in groups) == 2


def test_a_checkpoint_has_the_lines_that_no_batch_has_had_yet() -> None:
    """Groups that end between the batch and the checkpoint would be in neither run's ledger: the first repeats them, the other never knew
    them."""

    async def main() -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
        domain = make_domain("a", samples=2, filter=GroupFilter(easy, tries=10))
        service, _, _ = make_service([domain], supply=Asynchronous(2), slots=2)
        first = (await service.next_batch(4)).ledger
        await asyncio.sleep(0.2)
        state = json.loads(json.dumps(service.state_dict()))
        again, _, _ = make_service([make_domain("a", samples=2, filter=GroupFilter(easy, tries=10))], supply=Asynchronous(2))
        again.load_state_dict(state)
        return first, state, (await again.next_batch(4)).ledger

    first, state, second = run_virtual(main())
    kept = ends(state["ledger"])
    assert {end for end, _ in kept.values()} == {"filtered", "dropped"}
    assert kept.items() <= ends(second).items() and not ends(first).keys() & kept.keys()
    assert sorted([*ends(first), *kept]) == list(range(state["next_group"]))
    dropped = {line["prompt"] for line in state["ledger"] if line["end"] == "dropped"}
    assert dropped == {one["row"][1] for one in state["domains"]["a"]["unfinished"]}


def test_a_run_that_finds_no_groups_can_still_say_why() -> None:
    async def main() -> list[dict[str, Any]]:
        service, _, _ = make_service([make_domain("a", rewards=TimedReward(fails=lambda item, asked: True))])
        with pytest.raises(DomainFailed):
            await service.next_batch(2)
        return service.last_ledger()

    lines = run_virtual(main())
    assert lines[-1]["event"] == "end" and ("failed", "the judge is away") in ends(lines).values()


def test_text_has_the_step_where_it_belongs() -> None:
    lines = [{"event": "group", "end": "delivered"}, {"event": "group", "end": "stale"}, {"event": "batch"}]
    assert [json.loads(line).get("step") for line in ledger_text(lines, 7).splitlines()] == [7, None, 7]


def rows() -> DataProto:
    """Samples 5, 6, 7: two of group 3, one of group 4."""
    return DataProto({"sample": torch.tensor([5, 6, 7]), "group": torch.tensor([3, 3, 4]), "index": torch.tensor([0, 2, 1])})


def test_masked_samples_have_all_their_causes(ledger: Ledger, tmp_path: Path) -> None:
    causes = {"truncated": torch.tensor([True, False, True]), "function": torch.tensor([True, False, False]), "none": torch.zeros(3).bool()}
    ledger.masked(2, rows(), Masked(torch.ones(3), {}))
    ledger.masked(2, rows(), Masked(torch.tensor([0.0, 1.0, 0.0]), causes))
    (line,) = lines_of(tmp_path)
    assert line == {"event": "masked", "step": 2, "samples": {"truncated": {"3": [0], "4": [1]}, "function": {"3": [0]}}}


def test_updates_name_their_samples_and_what_each_role_did(ledger: Ledger, tmp_path: Path) -> None:
    cut = [MiniBatch(epoch, np.array(samples), np.ones(len(samples))) for epoch, samples in ((0, [5, 7]), (0, [6]), (1, [5, 6, 7]))]
    fine, skipped = (Update(0, TrainResult({}, 0.5, 1.0, 1e-3, skipped=skip), {}, None) for skip in (False, True))
    ledger.updates(4, rows(), cut, {"actor": [[fine, skipped]], "critic": [[fine] * 3]})
    lines = lines_of(tmp_path)
    assert [(line["update"], line["epoch"], line["roles"]["actor"]) for line in lines] == [
        (1, 1, "trained"),
        (2, 1, "skipped"),
        (3, 2, "stopped"),
    ]
    assert [line["samples"] for line in lines] == [{"3": [0], "4": [1]}, {"3": [2]}, {"3": [0, 2], "4": [1]}]
    assert {line["roles"]["critic"] for line in lines} == {"trained"} and {line["step"] for line in lines} == {4}


def test_the_start_says_what_is_promised_and_ends_a_torn_line(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"event": "step", "st')
    ledger.start(0, 0)
    ledger.step(1, 1)
    torn, start, step = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert torn == '{"event": "step", "st' and json.loads(step) == {"event": "step", "step": 1, "version": 1}
    promised = json.loads(start)
    assert promised["resumed_from"] is None and promised["max_staleness"] == 0 and promised["short_batches"] is True
    assert promised["domains"]["add"] == {"share": 1.0, "least": 0, "samples": 8} and promised["trains"] is True


@pytest.mark.parametrize("own", [True, False])
def test_the_start_names_the_run_that_is_continued(own: bool, ledger: Ledger, tmp_path: Path) -> None:
    """A damaged checkpoint of its own folder has been renamed by then, so it is not looked at."""
    checkpoint = tmp_path / ("" if own else "other") / "checkpoints" / "step_000002"
    if not own:
        checkpoint.mkdir(parents=True)
        for name in ("state.json", "files.json"):
            (checkpoint / name).write_text("{}")
    config = ledger._config
    resumed = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": checkpoint})})
    Ledger(resumed, tmp_path).start(2, 2)
    (line,) = lines_of(tmp_path)
    assert (line["resumed_from"], line["step"]) == ("." if own else str(tmp_path / "other"), 2)
