import pytest

from roll_lite.observability import timers
from roll_lite.observability.timers import PoolWork, StepTimers, phase


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Pipeline:
    def __init__(self) -> None:
        self.clock = Clock()
        self.timers = StepTimers(self.clock)

    @phase("generate")
    def generate(self, seconds: float) -> str:
        self.clock.now += seconds
        return f"{seconds} s"

    @phase("train")
    def train(self) -> None:
        """1 s of its own, 2 s in an inner phase, 0.5 s after it."""
        self.clock.now += 1
        with self.timers.phase("critic"):
            self.clock.now += 2
        self.clock.now += 0.5


def test_phases_other_and_total_add_up() -> None:
    pipeline = Pipeline()
    with pipeline.timers.step():
        assert pipeline.generate(4.0) == "4.0 s"
        pipeline.clock.now += 0.25
        pipeline.train()
        pipeline.generate(1.0)
    last = pipeline.timers.last
    assert last.phases == {"generate": 5.0, "train": 3.5, "train/critic": 2.0}
    assert last.labelled() == last.phases | {"other": 0.25, "step": 8.75}, "the inner phase is not counted twice"
    assert list(last.phases) == ["generate", "train", "train/critic"]


def test_parts_of_a_phase_may_overlap_and_count_in_no_sum() -> None:
    pipeline = Pipeline()
    pipeline.timers.part("outside of a step", 1.0)
    with pipeline.timers.step(), pipeline.timers.phase("train"):
        pipeline.clock.now += 3.0
        pipeline.timers.part("actor_train", 2.5)
        pipeline.timers.part("critic", 3.0)
        pipeline.timers.part("critic", 0.25)
    last = pipeline.timers.last
    assert last.labelled() == {"train": 3.0, "train/actor_train": 2.5, "train/critic": 3.25, "other": 0.0, "step": 3.0}


def test_steps_do_not_leak_into_each_other_but_the_run_adds_up() -> None:
    pipeline = Pipeline()
    pipeline.generate(10.0)
    for seconds in (1.0, 2.0):
        with pipeline.timers.step():
            pipeline.generate(seconds)
    assert pipeline.timers.last.phases == {"generate": 2.0}
    pipeline.train()
    pipeline.clock.now += 7
    assert pipeline.timers.wall() == {"total": 23.5, "generate": 13.0, "train": 3.5}, "outermost phases only"


def test_a_step_or_phase_that_fails_is_measured_and_closed() -> None:
    pipeline = Pipeline()
    with pytest.raises(RuntimeError), pipeline.timers.step():
        with pipeline.timers.phase("train"):
            pipeline.clock.now += 3
            raise RuntimeError
    assert pipeline.timers.last.phases == {"train": 3.0}
    with pipeline.timers.step():
        pipeline.generate(1.0)
    assert pipeline.timers.last.phases == {"generate": 1.0}, "nothing was left open"


def test_the_decorated_method_keeps_its_name() -> None:
    assert Pipeline.generate.__name__ == "generate"


def test_reserved_names_are_refused() -> None:
    for name in ("other", "step", "a/b"):
        with pytest.raises(AssertionError, match="not a name for a phase"), StepTimers().phase(name):
            pass


def test_overlapping_work_of_a_pools_member_is_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    work = PoolWork()
    for now, seconds in ((13.0, 3.0), (14.0, 2.5), (18.0, 4.5), (20.0, 1.0)):  # from 10, 11.5, 13.5, 19
        monkeypatch.setattr(timers.time, "time", lambda now=now: now)
        work.add("judges.grader", 0, "score", seconds)
    work.add("judges.other", 0, "score", 1.0)
    with work.of("judges.grader", 1, "score"):
        pass
    found = work.take()
    assert [(one.name, one.start, one.seconds) for one in found[:3]] == [
        ("judges.grader[0] score", 10.0, 8.0),
        ("judges.grader[0] score", 19.0, 1.0),
        ("judges.other[0] score", 19.0, 1.0),
    ]
    assert (found[3].name, found[3].parent, found[3].role, found[3].rank) == ("judges.grader[1] score", "step", "judges.grader", 1)
    assert work.take() == []
