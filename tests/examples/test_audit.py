"""The audit of a ledger: a good one passes, and each kind of mistake made by hand is found."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_support import TimedReward, make_domain, make_service
from support_scripted import Response

from roll_lite.data.samples import GenerationRequest, RewardInput, SampleGroup
from roll_lite.scheduler.filters import LOW, GroupFilter, LeftOut
from roll_lite.scheduler.supply import Asynchronous
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.rollout_output import ledger_text

AUDIT = Path(__file__).resolve().parents[2] / "examples" / "audit.py"
Line = dict[str, Any]
STALENESS, EPOCHS, CHECKPOINT, STEPS = 2, 2, 3, 6
PROMISED = {"a": {"share": 2.0, "least": 0, "samples": 2}, "b": {"share": 1.0, "least": 0, "samples": 2}}


def audit(run: Path) -> tuple[int, str]:
    """Without this checkout on its path: it needs plain Python only."""
    done = subprocess.run([sys.executable, "-I", "-S", str(AUDIT), str(run)], capture_output=True, text=True, check=False)
    assert done.stderr == "" or done.returncode == 2, done.stderr
    return done.returncode, done.stdout + done.stderr


def start_line(resumed_from: str | None, step: int) -> Line:
    promises = {"trains": True, "replays": False, "max_staleness": STALENESS, "ppo_epochs": EPOCHS, "short_batches": False}
    return {"event": "start", "resumed_from": resumed_from, "step": step, "version": step, **promises, "domains": PROMISED}


def trained(lines: list[Line], step: int) -> list[Line]:
    """What the driver writes of a batch: one sample is masked, the others train in two mini-batches per pass."""
    mine = [line for line in lines if line.get("end") == "delivered" and line.get("step") == step]
    names = [(line["group"], index) for line in mine for index in range(2) if str(index) not in line.get("failed", {})]
    masked = {"truncated": {str(names[0][0]): [names[0][1]]}}
    written: list[Line] = [{"event": "masked", "step": step, "samples": masked}]
    for update in range(2 * EPOCHS):
        samples: dict[str, list[int]] = {}
        for group, index in names[1:][update % 2 :: 2]:
            samples.setdefault(str(group), []).append(index)
        written.append(
            {
                "event": "update",
                "step": step,
                "update": update + 1,
                "epoch": update // 2 + 1,
                "roles": {"actor": "trained"},
                "samples": samples,
            }
        )
    return [*written, {"event": "step", "step": step, "version": step}]


def service_of(state: dict[str, Any] | None) -> tuple[Any, Any]:
    def script(request: GenerationRequest) -> Response:
        return Response(4 + 40 * (request.prompt_ids[1] % 5 == 0), 0.01)

    def easy(group: SampleGroup) -> LeftOut | None:
        return LeftOut(LOW, "too easy") if group.samples[0].id.prompt_uid % 4 == 0 else None

    def fails(item: RewardInput, asked: int) -> bool:
        return item.prompt in ("b 3", "b 5")

    domains = [
        make_domain("a", 0, prompts=40, share=2.0, samples=2, filter=GroupFilter(easy, tries=10)),
        make_domain("b", 1, prompts=20, samples=2, rewards=TimedReward(fails=fails)),
    ]
    service, _, engines = make_service(domains, [script], supply=Asynchronous(STALENESS), slots=6)
    if state is not None:
        service.load_state_dict(state)
    return service, engines[0]


async def update(service: Any, engine: Any, version: int) -> None:
    await service.hold()
    await engine.begin_weight_update([])
    await engine.receive_bucket([])
    await engine.finish_weight_update(version)
    service.set_version(version)


async def preempted(lines: list[Line], reached: int, state: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    """State after step `reached` of a run that is ended so many seconds into the next step; the lines are added to."""
    service, engine = service_of(state)
    for step in range((state["batches"] if state else 0) + 1, reached + 2):
        await update(service, engine, step - 1)
        waiting = asyncio.create_task(service.next_batch(6))
        await asyncio.wait([waiting], timeout=seconds if step > reached else None)
        if waiting.done():
            lines += [json.loads(line) for line in ledger_text(waiting.result().ledger, step).splitlines()]
        if step <= reached:
            lines += trained(lines, step)
    kept: dict[str, Any] = json.loads(json.dumps(service.state_dict(reached)))
    waiting.cancel()
    service.close()
    return kept


async def run_to(steps: int, lines: list[Line], first: int = 1, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """State at the checkpoint; the lines are added to."""
    service, engine = service_of(state)
    kept: dict[str, Any] = {}
    for step in range(first, steps + 1):
        await update(service, engine, step - 1)
        text = ledger_text((await service.next_batch(6)).ledger, step)
        lines += [json.loads(line) for line in text.splitlines()]
        lines += trained(lines, step)
        await asyncio.sleep(0.05)
        if step == CHECKPOINT:
            kept = json.loads(json.dumps(service.state_dict()))
    lines += [json.loads(line) for line in ledger_text(service.last_ledger()).splitlines()]
    service.close()
    return kept


def write(run: Path, lines: list[Line]) -> None:
    run.mkdir(exist_ok=True)
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def good() -> list[Line]:
    """Asynchronous, with a filter, failed samples and lost groups."""
    lines = [start_line(None, 0)]
    run_virtual(run_to(STEPS, lines))
    return lines


@pytest.fixture(scope="module")
def resumed() -> tuple[list[Line], list[Line]]:
    """A run to step 5, killed while it trained, and one that goes on from its checkpoint of step 3."""
    first, second = [start_line(None, 0)], [start_line("/moved/first", CHECKPOINT)]
    state = run_virtual(run_to(5, first))
    run_virtual(run_to(STEPS, second, CHECKPOINT + 1, state))
    cut = next(place for place, line in enumerate(first) if line["event"] == "update" and line["step"] == 5)
    return first[: cut + 1], second


def test_a_good_ledger_adds_up(good: list[Line], tmp_path: Path) -> None:
    write(tmp_path, good)
    code, output = audit(tmp_path)
    assert code == 0, output
    assert output.endswith("the ledger adds up\n")
    assert f"steps: {STEPS}; {4 * STEPS} actor trained, {4 * STEPS} updates" in output
    assert "a: group filtered: too easy" in output and "b: sample failed: the judge is away" in output
    assert "x a: sample masked: truncated" in output and "a: group dropped: the run ended" in output


def test_a_run_is_audited_with_the_one_before_it(resumed: tuple[list[Line], list[Line]], tmp_path: Path) -> None:
    """Its steps 4 and 5 were made twice, but the first time does not count."""
    first, second = resumed
    write(tmp_path / "first", first)
    write(tmp_path / "second", second)
    code, output = audit(tmp_path / "second")
    assert code == 0, output
    assert "1 later step(s) there do not count" in output and f"steps: {STEPS};" in output
    assert "in flight at the checkpoint" in output
    code, output = audit(tmp_path / "first")
    assert code == 0, output
    assert "step 5 was cut off" in output and "groups known to be in flight" in output


def test_a_run_may_go_on_in_its_own_folder(resumed: tuple[list[Line], list[Line]], tmp_path: Path) -> None:
    """After half a line, which the kill left."""
    first, second = resumed
    own = {**second[0], "resumed_from": "."}
    write(tmp_path, first)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "update", "st\n')
        file.writelines(json.dumps(line) + "\n" for line in [own, *second[1:]])
    code, output = audit(tmp_path)
    assert code == 0, output


def test_a_run_that_is_preempted_in_the_middle_of_steps_adds_up(tmp_path: Path) -> None:
    """Twice in one step, and with a batch that was handed out and not trained."""
    lines, state = list[Line](), None
    for reached, seconds in ((1, 0.1), (1, 0.2), (3, 0.05), (4, 100.0), (4, 0.01)):
        own = [start_line(".", state["batches"]) if state else start_line(None, 0)]
        state = run_virtual(preempted(own, reached, state, seconds))
        lines += own
        assert state["batches"] == reached
    last = [start_line(".", 4)]
    run_virtual(run_to(STEPS, last, 5, state))
    write(tmp_path, [*lines, *last])
    code, output = audit(tmp_path)
    assert code == 0 and f"steps: {STEPS};" in output and "in flight at the checkpoint" in output, output


def test_lines_that_a_checkpoint_did_not_keep_are_missed(resumed: tuple[list[Line], list[Line]], tmp_path: Path) -> None:
    first, second = resumed
    write(tmp_path / "first", first)
    write(tmp_path / "second", [line for line in second if line.get("cause") != "in flight at the checkpoint"])
    code, output = audit(tmp_path / "second")
    assert code == 1 and "lost without a cause: when the batch of step 4 was complete" in output


def test_a_run_after_one_without_a_ledger_is_audited_alone(resumed: tuple[list[Line], list[Line]], tmp_path: Path) -> None:
    write(tmp_path / "second", resumed[1])
    code, output = audit(tmp_path / "second")
    assert code == 0 and "has no ledger: what it did before step 3 is not audited" in output


def test_a_run_from_a_store_in_a_new_folder_is_audited_alone(resumed: tuple[list[Line], list[Line]], tmp_path: Path) -> None:
    own = {**resumed[1][0], "resumed_from": "."}
    write(tmp_path, [own, *resumed[1][1:]])
    code, output = audit(tmp_path)
    assert code == 0 and f"goes on from step {CHECKPOINT} in another folder: what was done before is not audited" in output, output


@pytest.mark.parametrize("end", ["dropped", "stale"])
def test_a_prompt_that_was_put_back_starts_before_new_ones(resumed: tuple[list[Line], list[Line]], tmp_path: Path, end: str) -> None:
    first, second = json.loads(json.dumps(resumed))
    if end == "dropped":  # in flight at the checkpoint
        again = next(line for line in second if "continues" in line)
        lost = again.pop("continues")
    else:
        again = one(second, "group", end="delivered", step=STEPS)
        lost = one(second, "group", end="delivered", step=CHECKPOINT + 1, domain=again["domain"])["group"]
        put_back = one(second, "group", group=lost)
        for name in ("step", "turns", "scores"):
            del put_back[name]
        put_back |= {"end": "stale", "cause": "surplus"}
    again["prompt"] = 99
    write(tmp_path / "first", first)
    write(tmp_path / "second", second)
    code, output = audit(tmp_path / "second")
    assert code == 1 and f"was lost without a cause: group {lost} was {end}, and group" in output, output


def one(lines: list[Line], event: str, **facts: Any) -> Line:
    return next(line for line in lines if line["event"] == event and all(line.get(name) == value for name, value in facts.items()))


def first_sample(update: Line) -> tuple[str, int]:
    group = next(iter(update["samples"]))
    return group, update["samples"][group][0]


def twice_in_a_pass(lines: list[Line]) -> None:
    group, index = first_sample(one(lines, "update", step=2, update=1))
    one(lines, "update", step=2, update=2)["samples"].setdefault(group, []).append(index)


def in_two_steps(lines: list[Line]) -> None:
    group, index = first_sample(one(lines, "update", step=2, update=1))
    one(lines, "update", step=3, update=1)["samples"][group] = [index]


def not_in_its_mini_batch(lines: list[Line]) -> None:
    one(lines, "update", step=2, update=3)["samples"].popitem()


def masked_and_trained(lines: list[Line]) -> None:
    one(lines, "update", step=2, update=1)["samples"] |= one(lines, "masked", step=2)["samples"]["truncated"]


def lost_group(lines: list[Line]) -> None:
    lines.remove(one(lines, "group", end="filtered"))


def no_cause(lines: list[Line]) -> None:
    one(lines, "group", end="filtered")["cause"] = ""


def lost_sample(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", step=2)["turns"][0] = []


def no_score(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", step=2)["scores"][0] = None


def too_old(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", step=5)["turns"][0][0][1] = 1


def from_the_future(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", step=5)["turns"][0][0][2] = 5


def admitted_too_early(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", step=5)["asked"] = 2


def other_domain(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", domain="a", step=4)["domain"] = "b"


def other_mix(lines: list[Line]) -> None:
    """Wanted and delivered agree, but the mix is not the one that was promised."""
    lines[0]["domains"]["b"]["share"] = 2.0


def prompt_twice(lines: list[Line]) -> None:
    groups = [line for line in lines if line.get("end") == "delivered" and line["domain"] == "a"]
    groups[0]["prompt"], groups[0]["epoch"] = groups[1]["prompt"], groups[1]["epoch"]


def two_ends(lines: list[Line]) -> None:
    group = one(lines, "group", end="delivered", step=3)
    lines.insert(lines.index(group) + 1, {**group, "end": "stale", "cause": "surplus"})


def continues_what_trained(lines: list[Line]) -> None:
    one(lines, "group", end="delivered", step=3)["continues"] = one(lines, "group", end="delivered", step=2)["group"]


def lost_update(lines: list[Line]) -> None:
    lines.remove(one(lines, "update", step=2, update=2))


def no_new_version(lines: list[Line]) -> None:
    one(lines, "step", step=STEPS)["version"] = STEPS - 1


def lost_step(lines: list[Line]) -> None:
    lines[:] = [line for line in lines if line.get("step") != 4 or line["event"] in ("group", "start")]


def damaged(lines: list[Line]) -> None:
    del lines[5]["event"]


def prompt_never_came(lines: list[Line]) -> None:
    """Only in its second epoch."""
    one(lines, "group", end="delivered", step=1)["epoch"] = 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (twice_in_a_pass, "trained twice: 2 times in pass 1"),
        (in_two_steps, "trained twice: in step 2 and in step 3"),
        (not_in_its_mini_batch, "is missing in the mini-batches of pass 2, without a cause"),
        (masked_and_trained, "is masked (truncated) and trained"),
        (lost_group, "was lost without a cause: when the batch of step"),
        (no_cause, "was lost without a cause (filtered)"),
        (lost_sample, "was lost without a cause: it has no turn and did not fail"),
        (no_score, "has no score and did not fail"),
        (too_old, "beyond the bound: step 5 trains version 4, and max_staleness is 2"),
        (from_the_future, "beyond the bound: step 5 trains version 4, and max_staleness is 2"),
        (admitted_too_early, "was admitted for batch 2 and trains in 5; max_staleness is 2"),
        (other_domain, "share off: 3 groups of a instead of 4"),
        (other_mix, "share off: 4 of 6 groups so far are of a, promised are 3.0"),
        (prompt_twice, "was used twice in epoch 0"),
        (two_ends, "ended twice: delivered and stale"),
        (continues_what_trained, "which was not dropped, or had another prompt"),
        (lost_update, "update 3 stands where update 2 is due"),
        (no_new_version, "made version 5 of version 5, with updates of the actor"),
        (lost_step, "step 5 follows step 3"),
        (damaged, "line 6 is damaged"),
        (prompt_never_came, "was lost without a cause: it never came in epoch 0"),
    ],
)
def test_each_mistake_is_found(good: list[Line], wrong: Callable[[list[Line]], None], message: str, tmp_path: Path) -> None:
    lines = json.loads(json.dumps(good))
    wrong(lines)
    write(tmp_path, lines)
    code, output = audit(tmp_path)
    assert code == 1 and "the ledger adds up" not in output
    assert any(message in line for line in output.splitlines() if line.startswith("VIOLATION: ")), output


def test_no_ledger_is_an_error_of_its_own(tmp_path: Path) -> None:
    code, output = audit(tmp_path)
    assert code == 2 and "has no ledger.jsonl" in output
