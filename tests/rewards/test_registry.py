"""From the configuration to a reward function, with users' own functions, their results and their mistakes."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_rewards import score_of

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.running.batch_scorer import BatchScorer
from roll_lite.rewards.terms import Reward

ROOT = Path(__file__).parents[2]

USER_MODULE = """
import asyncio
from typing import Literal
from roll_lite.data.samples import RewardInput, Score

LOOPS = []

def from_answer(sample):
    return sample.answer

def fails(sample):
    return 1 / 0

async def waits(sample, seconds: float = 0.0):
    LOOPS.append(asyncio.get_running_loop())
    await asyncio.sleep(seconds)
    return sample.answer

async def fails_late(sample):
    await asyncio.sleep(0)
    raise KeyError("late")

def with_args(sample, weight: float, mode: Literal["a", "b"] = "a", names: tuple[str, ...] = (), **rest):
    return {"value": weight, "details": {"mode": mode, "names": "+".join(names), "rest": len(rest)}}

def strict(sample: RewardInput, *, scale: int = 1) -> Score:
    return Score(scale, details={"scale": scale})

def no_sample():
    return 1

def unresolvable(sample, x: "Missing" = 1):
    return x

class Judge:
    async def __call__(self, sample, bonus: int = 0):
        return 1 + bonus

judge = Judge()
not_callable = 3
"""


@pytest.fixture(scope="module", autouse=True)
def user_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(USER_MODULE)
    (folder / "broken_rewards.py").write_text("import no_such_package_at_all\n")
    (folder / "raising_rewards.py").write_text("raise RuntimeError('no licence')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def item(answer: Any = None, response: str = "", **columns: Any) -> RewardInput:
    return RewardInput("own", "prompt", response, answer, columns, "stop")


def reward(type_: str, **args: Any) -> Reward:
    return build_reward(RewardConfig(name=type_, args=args), "domains.own.reward")


def test_built_in_rewards() -> None:
    assert score_of(reward("math"), item("1/2", "0.5")).is_correct
    assert score_of(reward("math", extract="boxed"), item("1/2", "0.5")).value == 0.0
    assert score_of(reward("exact", ignore_case=True), item("a", "A")) == Score(1.0, True, {"extracted": "a"}, answer="a")
    reward("math").warm()
    reward("exact").warm()


def test_the_example_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    function = reward("examples.domains.reverse.score", partial_credit=0.5)
    assert score_of(function, item(response=" enots\n", word="stone")) == Score(1.0)
    assert score_of(function, item(response="enott", word="stone")).value == pytest.approx(0.5 * 4 / 5)
    assert score_of(function, item(response="", word="stone")).value == 0.0
    assert not score_of(function, item(response="", word="stone")).is_correct
    with pytest.raises(RewardFailed, match=r"reward examples\.domains\.reverse\.score: KeyError: 'word' \(.*reverse\.py, line \d+\)"):
        score_of(function, item(response="enots"))


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, Score(1.0)),
        (-0.25, Score(-0.25)),
        (True, Score(1.0, True)),
        (False, Score(0.0, False)),
        (np.float32(0.5), Score(0.5)),
        (np.int64(2), Score(2.0)),
        (np.bool_(True), Score(1.0, True)),
        ({"value": 0.5}, Score(0.5)),
        ({"value": 0.5, "correct": True, "details": {"length": 3, "kind": "x"}}, Score(0.5, True, {"length": 3.0, "kind": "x"})),
        (Score(0.5, None, {"a": 1}), Score(0.5, None, {"a": 1.0})),
    ],
)
def test_results_become_scores(returned: Any, score: Score) -> None:
    for function in (reward("own_rewards.from_answer"), reward("own_rewards.waits")):
        found = score_of(function, item(returned))
        assert found == score and type(found.value) is float
        assert asyncio.run(function.base.score(item(returned))) == score


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "returned None of type NoneType; expected a number, a bool, a Score or a dict"),
        ("1", "returned '1' of type str"),
        ([1], "of type list"),
        (1j, "of type complex"),
        (float("nan"), "returned nan, which is not finite"),
        (float("-inf"), "returned -inf, which is not finite"),
        (Score(float("nan")), "not finite"),
        (Score("1"), "of type str"),  # type: ignore[arg-type]
        ({}, "a dict with no value; its keys are value"),
        ({"score": 1}, "a dict with unknown score; its keys are value"),
        ({"value": 1, "correct": 1}, "correct must be a bool or None, got 1"),
        ({"value": 1, "details": [1]}, "details must be a dict"),
        ({"value": 1, "details": {"a": None}}, r"details\['a'\]: must be a number or a string, got None"),
    ],
)
def test_other_results_are_failures_never_zeros(returned: Any, problem: str) -> None:
    for function in (reward("own_rewards.from_answer"), reward("own_rewards.waits")):
        with pytest.raises(RewardFailed, match=problem):
            score_of(function, item(returned))


def test_exceptions_are_failures_with_their_place() -> None:
    with pytest.raises(
        RewardFailed, match=r"reward own_rewards\.fails: ZeroDivisionError: division by zero \(.*own_rewards\.py, line 12\)"
    ) as caught:
        score_of(reward("own_rewards.fails"), item())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    late = reward("own_rewards.fails_late")
    with pytest.raises(RewardFailed, match="KeyError: 'late'"):
        score_of(late, item())


def test_failures_cross_processes() -> None:
    copy = pickle.loads(pickle.dumps(RewardFailed("no judge")))
    assert isinstance(copy, RewardFailed) and copy.cause == str(copy) == "no judge"


def test_async_functions_keep_their_loop_and_overlap() -> None:
    import own_rewards  # type: ignore[import-not-found]

    function = reward("own_rewards.waits", seconds=0.2)
    assert function.is_async and not reward("own_rewards.from_answer").is_async
    own_rewards.LOOPS.clear()
    scorer = BatchScorer(function, 60.0)
    scorer.one(item(1))
    scorer.one(item(1))
    assert own_rewards.LOOPS[0] is own_rewards.LOOPS[1]

    async def many() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        scores = await asyncio.gather(*[function.base.score(item(i)) for i in range(20)])
        assert [score.value for score in scores] == list(range(20))
        return loop.time() - started

    assert asyncio.run(many()) < 1.0


def test_callable_objects() -> None:
    function = reward("own_rewards.judge", bonus=2)
    assert function.is_async and score_of(function, item()).value == 3.0


def test_arguments_are_checked_and_converted_when_the_function_is_built() -> None:
    score = score_of(reward("own_rewards.with_args", weight=2, mode="b", names=["x", "y"], other=1), item())
    assert score == Score(2.0, None, {"mode": "b", "names": "x+y", "rest": 1.0})
    assert score_of(reward("own_rewards.unresolvable", x=3), item()).value == 3.0
    with pytest.raises(
        ValueError, match=r"own\.reward: 'own_rewards\.with_args' takes .*missing .*'weight'; its signature is \(sample, weight"
    ):
        reward("own_rewards.with_args")
    with pytest.raises(ValueError, match=r"domains\.own\.reward\.args\.weight: 'heavy': Input should be a valid number"):
        reward("own_rewards.with_args", weight="heavy")
    with pytest.raises(ValueError, match=r"got an unexpected keyword argument 'scal'; its signature is .*scale: int"):
        reward("own_rewards.strict", scal=2)
    with pytest.raises(ValueError, match=r"reward: 'own_rewards\.no_sample' takes a sample .*too many positional arguments; .* \(\)"):
        reward("own_rewards.no_sample")
    with pytest.raises(ValueError, match="multiple values for argument 'sample'"):
        reward("own_rewards.with_args", weight=1, sample=2)
    with pytest.raises(ValueError, match=r"args\.extract = .boxes.: expected one of auto, boxed, tagged, number; did you mean 'boxed'"):
        reward("math", extract="boxes")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("maths", "'maths' is no reward, did you mean 'math'.; there are "),
        ("own_rewards.fail", "own_rewards has no 'fail'; did you mean 'fails'"),
        ("no_such_module_here.score", "there is no module 'no_such_module_here' importable from"),
        ("own_rewards.deeper.score", "there is no module 'deeper' in own_rewards"),
        ("broken_rewards.score", "importing broken_rewards failed: ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("raising_rewards.score", "importing raising_rewards failed: RuntimeError: no licence"),
        ("own_rewards.not_callable", "is a constant of type int; expected a function"),
        ("own_rewards.Judge", "is a class; expected a function"),
        (".score", "'.score'"),
    ],
)
def test_types_that_are_none(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^domains\.own\.reward\.name: ") as caught:
        reward(name)
    assert problem.replace("'.;", "'?;") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("judge", {"url": "http://host/v1", "model": "m", "api_key_env": "sk-secret"}, "the key itself must not stand here"),
        ("judge", {"url": "http://host/v1", "model": "m", "api_key_env": "sk_secret"}, "no environment variable of this name"),
        ("judge", {"url": "http://host/v1", "model": "m", "api_key_env": ["sk-secret"]}, "expected text"),
        ("judge", {"url": "me:sk-secret@host/v1", "model": "m"}, "is no URL of the form"),
        ("code", {"backend": {"url": "http://host/run", "api_key_env": "sk-secret"}}, "the key itself must not stand here"),
        ("code", {"backend": "http://me:sk-secret@host"}, "expected a section with the keys"),
    ],
)
def test_a_key_in_the_place_of_its_variables_name_is_not_repeated(name: str, args: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        build_reward(RewardConfig(name=name, args=args), "domains.toy.reward")
    shown = "".join(traceback.format_exception(caught.value))
    assert "sk-secret" not in shown and "sk_secret" not in shown
