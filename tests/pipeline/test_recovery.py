"""Recovery from lost training ranks, with stand-ins for the models: what is restarted, loaded and repeated, and when the run ends."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_lite.config.schema.run import LimitsConfig
from roll_lite.data.proto import DataProto
from roll_lite.distributed.failures import RankFailed
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.watchdog import WATCHDOG, Preempted, PreemptedUnsaved
from roll_lite.pipeline import recovery as module
from roll_lite.pipeline.checkpoint_files import DamagedCheckpoint
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.recovery import Recovery
from roll_lite.pipeline.rlvr import Unrecorded
from roll_lite.pipeline.run import PhaseLimits


class Story(list[str]):
    """What happened, in order."""

    def tells(self, what: str) -> Any:
        return lambda *_: self.append(what)


def lost(role: str, retryable: bool = True) -> RankFailed:
    return RankFailed(role, 1, "train", "its process died\nits log ends with: ...", retryable)


def batch(tokens: int = 10) -> Any:
    rows = DataProto({"prompt_length": torch.tensor([tokens]), "response_length": torch.tensor([0])})
    return SimpleNamespace(rows=rows)


class Pipeline:
    """Four steps: `step` takes a batch, trains and counts."""

    def __init__(self, restarts: int = 3) -> None:
        self.story = story = Story()
        self.steps_done = self.version = 0  # the version is not looked at
        self.restored: dict[str, Any] = {}
        self.fails: dict[str, list[RankFailed]] = {}
        self.copy_is_lost = False
        self.models = {
            role: SimpleNamespace(
                ranks=SimpleNamespace(name=role, rebuild=story.tells(f"rebuild {role}")), role=SimpleNamespace(restarts=restarts)
            )
            for role in ("reference", "actor_train", "critic")
        }
        trained = {role: self.models[role] for role in ("actor_train", "critic")}
        self.checkpoints = checkpoints = SimpleNamespace(stateful=lambda _: trained, go_back=self._go_back, newest_step=0, copied_step=0)
        self.lost_judges: list[str] = []
        source = SimpleNamespace(
            end_transfer=lambda: self.phases.append("end of the transfer"),
            wait_for_files=lambda: None,
            trainer_lost=story.tells("trainer lost"),
            state_dict=lambda: {"batches": 0},
            restart=lambda state: story.append(f"service after {state['batches']}"),
            judge_roles=["judges.main"],
            judge_lost=self._judge_lost,
            restart_judges=self._restart_judges,
        )
        journal = SimpleNamespace(
            timers=SimpleNamespace(phase=self._phase),
            rank_lost=lambda failure, since, reached, repeats, in_memory: story.append(
                f"{failure.role} lost, {'copy of ' * in_memory}{since} to {reached}"
            ),
            rank_returned=story.tells("returned"),
            ledger=SimpleNamespace(start=lambda step, version, again: story.append(f"ledger from {step}")),
            go_back=lambda step: story.append(f"journal to {step}"),
        )
        config = SimpleNamespace(rollout=SimpleNamespace(restarts=restarts))
        models = SimpleNamespace(all=list(self.models.values()))
        self.validation = SimpleNamespace(forget=lambda: None)
        self.validation_is_due = False
        self.phases: list[str] = []
        self.early_forgotten = 0
        self.early = SimpleNamespace(forget=self._forget_early)
        self.recovery = Recovery(config, models, source, checkpoints, journal)  # type: ignore[arg-type]
        self.recovery.begin(self.state())

    @contextmanager
    def _phase(self, name: str) -> Any:
        self.phases.append(name)
        yield

    def _judge_lost(self, failure: RankFailed) -> bool:
        is_lost = failure.role == "judges.main" and failure.retryable
        self.lost_judges += [failure.role] * is_lost
        return is_lost

    def _restart_judges(self) -> None:
        self.story.extend(f"judge {role}" for role in self.lost_judges)
        self.lost_judges.clear()

    def _forget_early(self) -> None:
        assert "rebuild" not in str(self.story[-1:]), "before the new ranks come"
        self.early_forgotten += 1

    def _go_back(self, _: Any) -> dict[str, Any] | None:
        copied, self.checkpoints.copied_step = self.checkpoints.copied_step, 0
        newest = max(self.checkpoints.newest_step, copied)
        self.story.append(f"load {newest}")
        if self.copy_is_lost:
            self.copy_is_lost = False
            raise lost("actor_train")
        self.checkpoints.copied_step = copied
        return {"pipeline": {"steps_done": newest}, "rollouts": {"batches": newest}} if newest else None

    def state(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done, "controller": f"after {self.steps_done}"}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps_done, self.restored = state["steps_done"], state
        self.story.append(f"restore {self.steps_done}")

    def validate(self, step: int | None = None) -> None:
        with self._phase("validation"):
            self.story.append("validate" if step is None else f"validation of {step}")

    def repeat_update(self, rollouts: Any) -> None:
        self.steps_done += 1
        self.story.append(f"repeat {self.steps_done} on {rollouts.number}")

    def step(self) -> None:
        number = self.steps_done + 1

        def take() -> Any:
            self.story.append(f"generate {number}")
            taken = batch()
            taken.number, taken.state = number, {"batches": number}
            return taken

        assert self.recovery.batch(number, take).number == number
        self._may_fail("before training")
        with self.recovery.updating():
            assert "rollouts" in WATCH.overlooked
            self._may_fail("training")
            self.story.append(f"train {number}")
        self.steps_done = number
        self.recovery.step_is_done(self.state())

    def _may_fail(self, where: str) -> None:
        if failures := self.fails.get(f"{where} {self.steps_done + 1}"):
            raise failures.pop(0)

    def run(self, steps: int) -> list[str]:
        while self.steps_done < steps:
            self.recovery.survive(self, self.step)  # type: ignore[arg-type]
        return self.story


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "initialize", lambda _: None)
    monkeypatch.setattr(module, "_room", lambda: 1e9)


def test_trained_models_go_back_and_repeat_the_updates_on_the_kept_batches() -> None:
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step = 1
    pipeline.story.clear()
    pipeline.fails = {"training 3": [lost("critic")]}
    assert pipeline.run(3) == [
        "generate 3",
        *("critic lost, 1 to 2", "rebuild actor_train", "rebuild critic", "trainer lost"),
        *("load 1", "restore 1", "repeat 2 on 2", "returned"),
        "train 3",
    ]
    assert pipeline.early_forgotten == 1
    assert pipeline.restored == {"steps_done": 1, "controller": "after 0"}, "a part that the checkpoint lacks is as at the start"


def test_a_copy_that_is_newer_than_the_checkpoint_is_loaded_and_the_batches_of_both_are_kept() -> None:
    pipeline = Pipeline()
    pipeline.run(3)
    pipeline.checkpoints.newest_step, pipeline.checkpoints.copied_step = 1, 3
    pipeline.fails = {"training 4": [lost("critic")]}
    pipeline.story.clear()
    restarted = ("rebuild actor_train", "rebuild critic", "trainer lost")
    assert pipeline.run(4) == ["generate 4", "critic lost, copy of 3 to 3", *restarted, "load 3", "restore 3", "returned", "train 4"]
    pipeline.fails, pipeline.copy_is_lost = {"before training 5": [lost("actor_train")]}, True
    pipeline.story.clear()
    assert pipeline.run(5) == [
        *("generate 5", "actor_train lost, copy of 3 to 4", *restarted, "load 3", "actor_train lost, 1 to 4", *restarted, "load 1"),
        *("restore 1", "repeat 2 on 2", "repeat 3 on 3", "repeat 4 on 4", "returned", "train 5"),
    ]


def test_without_a_checkpoint_they_start_from_the_start_weights() -> None:
    pipeline = Pipeline()
    pipeline.fails = {"before training 2": [lost("actor_train")]}
    assert pipeline.run(2)[3:] == [
        *("actor_train lost, 0 to 1", "rebuild actor_train", "rebuild critic", "trainer lost"),
        *("load 0", "restore 0", "repeat 1 on 1", "returned", "train 2"),
    ]


def test_a_reference_that_follows_nobody_starts_again_alone_unless_updates_have_begun() -> None:
    pipeline = Pipeline()
    pipeline.fails = {"before training 2": [lost("reference")]}
    assert pipeline.run(2)[3:] == ["reference lost, 1 to 1", "rebuild reference", "restore 1", "returned", "train 2"]
    pipeline.fails = {"training 3": [lost("reference")]}
    pipeline.story.clear()
    assert pipeline.run(3)[1:] == [
        *("reference lost, 0 to 2", "rebuild actor_train", "rebuild critic", "rebuild reference", "trainer lost"),
        *("load 0", "restore 0", "repeat 1 on 1", "repeat 2 on 2", "returned", "train 3"),
    ]


def test_a_judge_starts_again_alone_and_the_step_is_repeated() -> None:
    pipeline = Pipeline()
    pipeline.fails = {"before training 2": [lost("judges.main")]}
    assert pipeline.run(2)[3:] == ["judges.main lost, 1 to 1", "judge judges.main", "restore 1", "returned", "train 2"]
    pipeline.fails = {"before training 3": [lost("judges.main", retryable=False)]}
    with pytest.raises(RankFailed, match="its process died"):
        pipeline.run(3)


def test_a_judge_that_is_back_is_left_alone_though_a_rank_is_lost_meanwhile() -> None:
    pipeline = Pipeline()
    pipeline.fails = {"before training 2": [lost("judges.main")]}
    fail_in(pipeline, pipeline, "restore", lost("reference"))
    assert pipeline.run(2)[3:] == [
        *("judges.main lost, 1 to 1", "judge judges.main"),
        *("reference lost, 1 to 1", "rebuild reference", "restore 1", "returned", "train 2"),
    ]


def test_each_part_of_a_recovery_has_its_own_limit() -> None:
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step = 2
    pipeline.validation.forget = lambda: 2
    pipeline.fails = {"before training 3": [lost("rollouts"), lost("critic")]}
    pipeline.run(3)
    service = ["recovery", "start", "end of the transfer", "start", "validation"]
    assert pipeline.phases == [*service, "recovery", "start", "end of the transfer", "checkpoint"]


def test_recoveries_without_a_new_step_end_the_run_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its repeated updates hang for an hour each time."""
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.fails = {"training 3": [lost("actor_train")]}

    def hang(_: Any) -> None:
        nonlocal now
        now += 4000.0
        raise lost("actor_train")

    repeat, pipeline.repeat_update = pipeline.repeat_update, hang  # type: ignore[method-assign]
    with pytest.raises(RankFailed, match=r"its process died \(after 3 restarts without a new step, actor_train.restarts\)"):
        pipeline.run(3)
    assert now == 12000.0
    pipeline.repeat_update = repeat  # type: ignore[method-assign]
    for step in range(3, 7):
        now += 4000.0
        pipeline = pipeline if step > 3 else Pipeline()
        pipeline.fails = {f"training {step}": [lost("actor_train")]}
        pipeline.run(step)


def test_a_rank_that_is_lost_during_recovery_begins_it_again() -> None:
    pipeline = Pipeline()
    pipeline.fails = {"training 2": [lost("actor_train")]}
    repeat = pipeline.repeat_update
    losses = [lost("reference")]

    def fail_once(rollouts: Any) -> None:
        if losses:
            raise losses.pop()
        repeat(rollouts)

    pipeline.repeat_update = fail_once  # type: ignore[method-assign]
    story = pipeline.run(2)
    assert story.count("restore 0") == 2 and story[-3:] == ["repeat 1 on 1", "returned", "train 2"]
    assert "rebuild reference" in story and story.count("rebuild actor_train") == 2


@pytest.mark.parametrize("second", ["reference", "rollouts"])
def test_two_losses_that_are_told_together_are_recovered_together(second: str) -> None:
    pipeline = Pipeline(restarts=1)
    first = lost("actor_train")
    first.others = (lost(second),)
    pipeline.fails = {"before training 1": [first]}
    story = pipeline.run(1)
    assert ["actor_train lost, 0 to 0", f"{second} lost, 0 to 0"] == story[1:3] and "rebuild actor_train" in story
    assert ("rebuild reference" if second == "reference" else "service after 0") in story and story[-1] == "train 1"
    pipeline.fails = {"before training 2": [lost(second)]}
    with pytest.raises(RankFailed, match=f"{second} rank 1 failed .*after 1 restarts"):  # both have counted
        pipeline.run(2)


def fail_in(pipeline: Pipeline, owner: Any, name: str, failure: RankFailed) -> None:
    """Let a call fail once."""
    call, failures = getattr(owner, name), [failure]

    def failing(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        call(*arguments)

    setattr(owner, name, failing)


@pytest.mark.parametrize("second", [lost("reference"), lost("actor_train")])
def test_a_service_is_restarted_though_a_rank_is_lost_meanwhile(second: RankFailed) -> None:
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step = 2
    pipeline.fails = {"before training 3": [lost("rollouts")]}
    fail_in(pipeline, pipeline.recovery._source, "restart", second)
    pipeline.story.clear()
    story = pipeline.run(3)
    assert story.count("service after 2") == 1 and story.index("service after 2") > story.index(f"rebuild {second.role}")
    assert story[-3:] == ["returned", "generate 3", "train 3"]


def test_a_lost_validation_runs_again_though_a_rank_is_lost_while_it_begins() -> None:
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step = 2
    forgotten: list[int | None] = [0, None]
    pipeline.validation.forget = lambda: forgotten.pop(0)
    pipeline.fails = {"before training 3": [lost("rollouts")]}
    fail_in(pipeline, pipeline, "validate", lost("reference"))
    pipeline.story.clear()
    story = pipeline.run(3)
    assert story.count("validation of 0") == 1 and story[-3:] == ["returned", "generate 3", "train 3"]


def test_a_damaged_checkpoint_in_a_step_sets_nothing_aside() -> None:
    pipeline = Pipeline()

    def step() -> None:
        raise DamagedCheckpoint("files.json of one that waits for its upload")

    pipeline.step = step  # type: ignore[method-assign]
    with pytest.raises(DamagedCheckpoint):
        pipeline.run(1)


def test_a_run_goes_back_to_an_earlier_step_though_a_rank_is_lost_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_room", lambda: 32.0 * 10)  # one batch
    pipeline = Pipeline()
    pipeline.run(3)
    pipeline.checkpoints.newest_step = 1
    pipeline.fails = {"training 4": [lost("critic")]}
    fail_in(pipeline, pipeline.recovery._source, "restart", lost("actor_train"))
    pipeline.story.clear()
    assert pipeline.run(4)[-12:] == [
        *("load 1", "restore 1", "service after 1", "ledger from 1", "journal to 1", "returned"),
        *(what for step in (2, 3, 4) for what in (f"generate {step}", f"train {step}")),
    ]


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_loaded() -> None:
    pipeline = Pipeline()
    pipeline.run(3)
    pipeline.checkpoints.newest_step = 3
    set_aside: list[DamagedCheckpoint] = []
    error, go_back = DamagedCheckpoint("files.json"), pipeline.checkpoints.go_back

    def go_back_once_damaged(models: Any) -> Any:
        if not set_aside:
            raise error
        return go_back(models)

    def set_aside_newest(damaged: DamagedCheckpoint) -> None:
        set_aside.append(damaged)
        pipeline.checkpoints.newest_step = 0

    pipeline.checkpoints.go_back, pipeline.checkpoints.set_aside_newest = go_back_once_damaged, set_aside_newest
    pipeline.fails = {"training 4": [lost("critic")]}
    story = pipeline.run(4)
    assert set_aside == [error] and story.count("rebuild critic") == 2
    assert story[-13:] == [
        *("restore 0", "service after 0", "ledger from 0", "journal to 0", "returned"),
        *(what for step in (1, 2, 3, 4) for what in (f"generate {step}", f"train {step}")),
    ]


def test_a_reference_starts_again_though_the_actor_is_lost_before_it_has() -> None:
    pipeline = Pipeline()
    pipeline.run(1)
    pipeline.fails = {"before training 2": [lost("reference")]}
    fail_in(pipeline, pipeline, "restore", lost("actor_train"))
    pipeline.story.clear()
    story = pipeline.run(2)
    assert story.count("rebuild reference") == 2 and story[-3:] == ["repeat 1 on 1", "returned", "train 2"]


def test_restarts_are_counted_by_role_within_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pipeline = Pipeline(restarts=2)
    pipeline.fails = {"training 1": [lost("actor_train"), lost("critic"), lost("actor_train")]}
    pipeline.run(1)
    now = 4000.0
    pipeline.fails = {"training 2": [lost("actor_train"), lost("actor_train")]}
    pipeline.run(2)
    pipeline.fails = {"training 3": [lost("actor_train")]}
    with pytest.raises(RankFailed, match=r"(?s)its process died \(after 2 restarts within an hour, actor_train.restarts\).*its log ends"):
        pipeline.run(3)


@pytest.mark.parametrize("failure", [lost("actor_train", retryable=False), lost("rollouts", retryable=False), lost("actor_infer")])
def test_errors_and_other_roles_end_the_run(failure: RankFailed) -> None:
    pipeline = Pipeline()
    pipeline.fails = {"training 1": [failure]}
    with pytest.raises(RankFailed) as caught:
        pipeline.run(1)
    assert caught.value is failure


def test_batches_are_kept_since_the_newest_checkpoint_as_far_as_the_store_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    pipeline.run(3)
    pipeline.checkpoints.newest_step = 2
    pipeline.run(4)
    assert list(pipeline.recovery._batches) == [3, 4]
    monkeypatch.setattr(module, "_room", lambda: 32.0 * 25)  # two batches of ten tokens
    pipeline.run(5)
    assert list(pipeline.recovery._batches) == [4, 5]
    pipeline.story.clear()
    pipeline.fails = {"training 6": [lost("critic")]}
    assert pipeline.run(6) == [
        "generate 6",
        *("critic lost, 2 to 5", "rebuild actor_train", "rebuild critic", "trainer lost", "load 2", "restore 2"),
        *("service after 2", "ledger from 2", "journal to 2", "returned"),
        *("generate 3", "train 3", "generate 4", "train 4", "generate 5", "train 5", "generate 6", "train 6"),
    ]


def test_a_lost_service_goes_on_after_its_last_batch_that_trained() -> None:
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.story.clear()
    pipeline.validation.forget = lambda: 2
    pipeline.fails = {"before training 3": [lost("rollouts")]}
    assert pipeline.run(3) == [
        *("generate 3", "rollouts lost, 2 to 2", "restore 2", "service after 2", "ledger from 2", "validation of 2", "returned"),
        *("generate 3", "train 3"),
    ]


@pytest.mark.parametrize("newest", [0, 1])
def test_a_service_that_is_lost_while_updates_are_under_way_takes_the_steps_since_the_checkpoint_along(newest: int) -> None:
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step = newest
    pipeline.story.clear()
    pipeline.validation_is_due = True
    pipeline.fails = {"training 3": [lost("rollouts")]}
    assert pipeline.run(3)[1:] == [
        *(f"rollouts lost, {newest} to 2", "rebuild actor_train", "rebuild critic", "trainer lost", f"load {newest}", f"restore {newest}"),
        *(f"service after {newest}", f"ledger from {newest}", f"journal to {newest}", "validate", "returned"),
        *(what for step in range(newest + 1, 4) for what in (f"generate {step}", f"train {step}")),
    ]


@pytest.mark.parametrize("phase", ["assign_credit", "load_copy"])
def test_a_batch_whose_tokens_are_lost_is_generated_again(phase: str) -> None:
    """They were lost with an engine's node; the kept batches may lack tokens, too. A copy of the state has no tokens."""
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step = 1
    pipeline.story.clear()
    failure = RankFailed("actor_train", 0, phase, "ObjectLostError: ...", retryable=True)
    failure.lost_object = True
    pipeline.fails = {"before training 3": [failure]}
    story = pipeline.run(3)
    if phase == "load_copy":
        assert story[-3:] == ["repeat 2 on 2", "returned", "train 3"]
    else:
        assert story[-9:] == [
            *("restore 1", "service after 1", "ledger from 1", "journal to 1", "returned"),
            *("generate 2", "train 2", "generate 3", "train 3"),
        ]


@pytest.mark.parametrize(
    ("under_way", "is_due", "again"),
    [
        (0, True, ["validation of 0", "validate"]),
        (0, False, ["validation of 0"]),
        (1, True, ["validation of 1"]),
        (1, False, ["validation of 1"]),
        (2, False, []),
    ],
)
def test_a_validation_that_was_under_way_runs_again_though_the_run_goes_back(under_way: int, is_due: bool, again: list[str]) -> None:
    """Unless its step is repeated."""
    pipeline = Pipeline()
    pipeline.run(2)
    pipeline.checkpoints.newest_step, pipeline.validation_is_due = 1, is_due
    pipeline.validation.forget = lambda: under_way
    pipeline.fails = {"training 3": [lost("rollouts")]}
    story = pipeline.run(3)
    assert story[story.index("journal to 1") + 1 : story.index("returned")] == again


@pytest.mark.parametrize(("role", "end"), [("actor_train", PreemptedUnsaved), ("reference", Preempted), ("rollouts", Preempted)])
def test_a_sigterm_ends_a_recovery_and_only_known_weights_are_saved(
    monkeypatch: pytest.MonkeyPatch, role: str, end: type[BaseException]
) -> None:
    pipeline = Pipeline()
    pipeline.run(1)

    def waits(state: Any) -> None:
        monkeypatch.setattr(WATCHDOG, "preempted_at", 0.0)
        WATCHDOG.check()

    pipeline.restore = waits  # type: ignore[method-assign]
    pipeline.fails = {"before training 2": [lost(role)]}
    with pytest.raises(end):
        pipeline.run(2)
    assert pipeline.recovery.reached["steps_done"] == 1


def test_nothing_is_recorded_of_a_repeated_update() -> None:
    silent: Any = Unrecorded()
    assert silent.ledger.masked(1, rows=2) is None and silent.credit([]) is None


@pytest.mark.parametrize("recorded", [2, 4], ids=["", "on the way back to step 2"])
def test_the_journal_voids_the_update_lines_of_the_step_in_progress(tmp_path: Path, recorded: int) -> None:
    from roll_lite.config.loading import load_config

    root = Path(__file__).resolve().parents[2]
    config = load_config("tiny_grpo", root / "examples/configs", [f"model.path={root}/examples/models/tiny"])
    journal = Journal(config, tmp_path)
    updates = [f'{{"step": {step}}}\n' for step in range(1, recorded + 2)]
    (tmp_path / "updates.jsonl").write_text("".join(updates))
    journal._steps = recorded
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_000003.jsonl").touch()
    journal.rank_lost(lost("actor_train"), since=0, reached=2, repeats="the updates of steps", in_memory=False)
    assert (tmp_path / "updates.jsonl").read_text() == "".join(updates[:recorded])
    assert (tmp_path / "samples" / "step_000003.jsonl").exists(), "the samples are used again"
    line = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert (line["event"], line["role"], line["rank"], line["step"]) == ("restart", "actor_train", 1, recorded)
    assert "its log ends with" in (tmp_path / "failure.txt").read_text()


def test_a_service_that_is_lost_before_the_files_of_its_batch_are_written_generates_it_again() -> None:
    pipeline, waits = Pipeline(), list[str]()

    def wait_for_files() -> None:
        waits.append("files")
        if len(waits) == 1:
            raise lost("rollouts")

    pipeline.recovery._source.wait_for_files = wait_for_files  # type: ignore[method-assign]
    story = pipeline.run(1)
    assert [line for line in story if line.startswith(("generate", "service", "train"))] == [
        "generate 1",
        "service after 0",
        "generate 1",
        "train 1",
    ]


@pytest.mark.parametrize(("factor", "expected"), [(10.0, 700.0), (0.0, 3600.0)])
def test_a_phase_that_lasts_much_longer_than_ever_counts_as_hung(monkeypatch: pytest.MonkeyPatch, factor: float, expected: float) -> None:
    now = 1000.0
    monkeypatch.setattr("roll_lite.pipeline.run.time.monotonic", lambda: now)
    limits = PhaseLimits(LimitsConfig(train=3600.0, generate=7200.0, hang_factor=factor))

    def limit(phase: str, lasts: float) -> float:
        nonlocal now
        with limits.limited(phase):
            assert WATCHDOG.nearest is not None
            seconds = WATCHDOG.nearest.seconds
            now += lasts
        return seconds

    assert limit("train", 70.0) == 3600.0, "nothing is known yet"
    assert limit("train", 1.0) == expected
    assert limit("log_probs", 1.0) == 7200.0
    assert limit("log_probs", 1.0) == (300.0 if factor else 7200.0), "short phases vary more"
    assert limit("generate", 70.0) == 7200.0 and limit("generate", 1.0) == 7200.0, "responses grow"
    with limits.limited("recovery"):
        assert WATCHDOG.nearest is None, "its parts have limits"


class Clock:
    """Measures limits of phases that last a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: PhaseLimits) -> None:
        self.now, self.limits = 1000.0, limits
        monkeypatch.setattr("roll_lite.pipeline.run.time.monotonic", lambda: self.now)

    def limit(self, phase: str, lasts: float) -> float:
        """Let a phase last that long, or fail at its limit; return the limit."""
        with suppress(TimeoutError), self.limits.limited(phase):
            assert WATCHDOG.nearest is not None
            seconds = WATCHDOG.nearest.seconds
            self.now += min(lasts, seconds)
            if lasts > seconds:
                raise TimeoutError
        return seconds


def test_forward_passes_of_which_only_the_rest_was_timed_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, PhaseLimits(LimitsConfig(), streams=True))
    assert clock.limit("log_probs", 2.0) == 7200.0
    clock.limit("train", 100.0)
    assert clock.limit("log_probs", 2.0) == 1000.0, "all of a batch that was complete at once takes no longer than its training"


def test_a_transfer_ends_a_hang_by_its_own_timeout_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, PhaseLimits(LimitsConfig(), transfer_s=120.0))
    assert [clock.limit("sync_weights", 50.0) for _ in range(2)] == [3600.0, 620.0]


def test_steps_that_train_the_critic_alone_say_nothing_about_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    step = 0
    clock = Clock(monkeypatch, PhaseLimits(LimitsConfig(train=3600.0), actor_trains=lambda: step > 3))
    limits = []
    for step in range(1, 7):
        limits.append(clock.limit("train", 10.0 if step <= 3 else 100.0))
        clock.limit("train", 0.0)  # replicas are compared in this phase, too
    assert limits == [*[3600.0] * 4, 1000.0, 1000.0]


def test_a_phase_that_was_slow_gets_more_time_when_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, PhaseLimits(LimitsConfig()))
    clock.limit("train", 1.0)
    assert clock.limit("train", 500.0) == 300.0
    with clock.limits.limited("recovery"):
        clock.limit("train", 1.0)
    assert clock.limit("train", 500.0) == 3000.0
    clock.limit("log_probs", 1.0)
    assert [clock.limit("log_probs", lasts) for lasts in (1e9, 1.0, 1.0)] == [300.0, 3000.0, 300.0], "a hang is found as soon as before"
