"""The reward `code`: forms of tests, languages, partial credit, limits, the remote back end, failures that are failures."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import time
from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support_rewards import score_of

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code import backends as code_backends
from roll_lite.rewards.code import tests as code_tests
from roll_lite.rewards.code.backends import RemoteBackend
from roll_lite.rewards.code.compare import same_output, same_value
from roll_lite.rewards.code.languages import Language, extract_code, known_languages
from roll_lite.rewards.code.reward import CodeReward
from roll_lite.rewards.code.rounds import Attempt, Rounds
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.running.batch_scorer import BatchScorer
from roll_lite.sandbox.pool import Ended, Limits, Outcome, Pair, Program, SandboxPool, SandboxTrouble
from roll_lite.sandbox.values import decode, encode

ROOT = Path(__file__).resolve().parents[3]
DOUBLE = "print(int(input()) * 2)"


def sample(response: str, answer: Any, **columns: Any) -> RewardInput:
    return RewardInput("code", "prompt", response, answer, columns, "stop")


def scored(response: str, answer: Any, columns: dict[str, Any] | None = None, **args: Any) -> Score:
    [score] = CodeReward(**args)([sample(response, answer, **(columns or {}))])
    assert isinstance(score, Score), score
    return score


def failed(response: str, answer: Any, columns: dict[str, Any] | None = None, **args: Any) -> str:
    [score] = CodeReward(**args)([sample(response, answer, **(columns or {}))])
    assert isinstance(score, RewardFailed), score
    return score.cause


def pairs(*numbers: int) -> list[dict[str, str]]:
    return [{"stdin": f"{number}\n", "stdout": f"{2 * number}\n"} for number in numbers]


STDIO = pairs(1, 5)
CALLS = {"fn_name": "f", "inputs": [[[1, 2]], [[]]], "outputs": [3, 0]}
HUMAN_EVAL = {"test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n", "entry_point": "f"}


@pytest.mark.parametrize(
    ("right", "wrong", "answer", "columns"),
    [
        (DOUBLE, "print(2)", STDIO, {}),
        (DOUBLE, "print(2)", json.dumps(STDIO), {}),
        (DOUBLE, "print(2)", {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}, {}),
        (DOUBLE, "print(2)", [{"input": "4\n", "output": "8\n", "testtype": "stdin"}], {}),
        ("def f(x): return sum(x)", "def f(x): return 3", CALLS, {}),
        ("class Solution:\n    def f(self, x): return sum(x)", "class Solution:\n    def f(self, x): return 3", json.dumps(CALLS), {}),
        ("def f(x): return sum(x)", "def f(x): pass", [{"input": "[1, 2]", "output": "3", "testtype": "functional"}], {"fn_name": "f"}),
        ("def f(x): return sum(x)", "def f(y): return 3", [{"args": [], "kwargs": {"x": [4]}, "expected": 4, "fn_name": "f"}], {}),
        ("def f(x): return sum(x)", "def f(x): return 3", "assert f([1, 2]) == 3\nassert f([]) == 0", {}),
        ("def f(x): return sum(x)", "def f(x): return 3", ["assert f([1, 2]) == 3", "assert f([]) == 0"], {}),
        ("def f(x): return sum(x)", "def f(x): return 3", HUMAN_EVAL, {}),
        ("def f(x): x.sort()", "def f(x): pass", "x = [2, 1]\nf(x)\nassert x == [1, 2]", {}),
        ("def f(x): raise KeyError(x)", "def f(x): pass", "try:\n    f(1)\nexcept KeyError: pass\nelse: assert False", {}),
        ("class C:\n    n = 4\n    def g(self): return 5", "class C:\n    n = 4", "c = C()\nassert c.n == 4 and c.g() == 5", {}),
    ],
)
def test_forms_of_tests(right: str, wrong: str, answer: Any, columns: dict[str, Any]) -> None:
    assert scored(f"Here:\n```python\n{right}\n```", answer, columns).value == 1.0
    bad = scored(wrong, answer, columns)
    assert bad.value == 0.0 and bad.correct is False and str(bad.details["verdict"]).startswith("test ")


def test_partial_credit_and_fail_fast() -> None:
    source = "n = int(input()); print(n * 2 if n != 2 else 0)"
    assert scored(source, pairs(1, 2, 3, 4), score="fraction").value == 0.75
    assert scored(source, pairs(1, 2, 3, 4), score="fraction", fail_fast=True).value == 0.25
    whole = scored(source, pairs(1, 2, 3, 4))
    told = {"extracted": source, "verdict": "test 2: printed '0\\n', expected '4\\n'", "passed": 1, "tests": 4}
    assert (whole.value, whole.correct, whole.details) == (0.0, False, told)


def test_programs_that_fail_are_wrong_and_no_failures() -> None:
    limits: dict[str, Any] = {"test_s": 0.4, "wall_s": 1.0, "memory_mb": 128, "output_kb": 16}
    for source, verdict in {
        "while True: pass": "time limit",
        "import time; time.sleep(9)": "time limit: did not end",
        "x = bytearray(1 << 30)": "exit status 1: MemoryError",
        "while True: print('x' * 99)": "output limit",
        "def f(": "exit status 1: SyntaxError",
        "import os; os._exit(3)": "exit status 3",
        "import no_such_module_here": "ModuleNotFoundError",
    }.items():
        score = scored(source, STDIO, **limits)
        assert score.value == 0.0 and verdict in str(score.details["verdict"]), (source, score)


@pytest.mark.parametrize("leave", ["exit()", "exit(0)", "quit()", "quit(0)", "import sys\nsys.exit()"])
def test_programs_may_leave_early(leave: str) -> None:
    assert scored(f"{DOUBLE}\n{leave}\nprint('more')", STDIO).value == 1.0
    assert scored(f"{DOUBLE}\nexit(3)", STDIO).details["verdict"] == "test 1: exit status 3: "


def test_all_tests_together_have_a_limit() -> None:
    source = "import time\ns = time.process_time()\nwhile time.process_time() - s < 0.3: pass\nprint(int(input()) * 2)"
    score = scored(source, pairs(1, 2, 3, 4), score="fraction", test_s=2.0, total_s=0.5)
    assert score.value < 1 and ("no time left" in str(score.details["verdict"]) or "time limit" in str(score.details["verdict"]))


def test_expressions() -> None:
    def value(response: str, answer: Any, **args: Any) -> float:
        return scored(response, answer, mode="expression", **args).value

    assert value("3 + 4", 7) == value(" (1 + 2) * 3\n", "9") == value("0.1 + 0.2", 0.3) == value("'a' * 3", "aaa") == 1.0
    assert value("3 + 5", 7) == value("3 +", 7) == value("1 / 0", 7) == value("exit()", 7) == value("x := 7", 7) == 0.0
    assert value("7", 7) == 1.0 and value("7", 7, must_contain=["+"]) == 0.0 and value("1 + 6", 7, must_contain=["+"]) == 1.0
    assert value("3 * 2 + 1", 7, forbid=["*"]) == 0.0 and value("", 7) == 0.0
    assert value("type('E', (), {'__eq__': lambda s, o: True})()", 7) == 0.0


@pytest.mark.parametrize(
    ("language", "tag", "needs", "source"),
    [
        ("bash", "sh", "bash", "read n; echo $((n * 2))"),
        ("javascript", "js", "node", "console.log(Number(require('fs').readFileSync(0, 'utf8')) * 2)"),
        ("c++", "cpp", "g++", "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * 2 << std::endl; }"),
        ("c", "c", "gcc", '#include <stdio.h>\nint main() { int n; scanf("%d", &n); printf("%d", n * 2); }'),
    ],
)
def test_languages(language: str, tag: str, needs: str, source: str) -> None:
    if shutil.which(needs) is None:
        pytest.skip(f"no {needs}")
    assert scored(f"```{tag}\n{source}\n```", STDIO, languages=["python", language]).value == 1.0
    assert scored(f"```{tag}\n{source}\n```", [{"stdin": "1", "stdout": "3"}], languages=["python", language]).value == 0.0
    assert "expected python" in str(scored(f"```{tag}\n{source}\n```", STDIO).details["verdict"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_what_does_not_compile_is_wrong() -> None:
    score = scored("```cpp\nint main( {\n```", STDIO, languages=["c++"])
    assert score.value == 0.0 and "does not compile" in str(score.details["verdict"])


def test_compiling_takes_of_a_samples_time() -> None:
    """Endless compiling is the program's fault, found out before the sample's own time is over."""
    own = {"slow": {"file": "main.x", "run": ["sh", "main.x"], "compile": ["sh", "-c", "sleep 500"]}}
    score = scored("x", STDIO, languages=["slow"], commands=own, total_s=0.2)
    assert (score.value, score.details["verdict"]) == (0.0, "does not compile: time limit: did not end")
    seen = list[Limits]()

    class Backend:
        def run_many(self, jobs: Sequence[Program | Pair]) -> list[Ended]:
            seen.extend(job.limits for job in jobs if isinstance(job, Program))
            return [Outcome(0, "", b"2\n", b"", b"artifact", 3.0, 0.1)] * len(jobs)

    attempt = Attempt("x", "x", Language(file="main.x", run=["./main"], compile=["make"]), [code_tests.Test("", "2\n")])
    Rounds(Limits(cpu_s=3.0, wall_s=9.0), "lines", 0, 1.5, True).run(Backend(), [attempt])
    assert [(one.cpu_s, one.wall_s) for one in seen] == [(1.5, 4.5), (0.5, 1.5)] and attempt.passed == 1


def test_what_cannot_be_scored_is_a_failure() -> None:
    assert "the tests cannot be read" in failed(DOUBLE, 5)
    assert "the tests cannot be read" in failed(DOUBLE, "no tests at all")
    assert "there are no tests" in failed(DOUBLE, [])
    assert "no column 'tests'" in failed(DOUBLE, None, column="tests")
    assert scored(DOUBLE, None, {"tests": STDIO}, column="tests").value == 1.0


def test_a_failure_leaves_its_neighbours_alone() -> None:
    results = CodeReward(parallel=2)([sample(DOUBLE, STDIO), sample(DOUBLE, 5), sample("no", STDIO), sample(DOUBLE, STDIO)])
    assert [one.value if isinstance(one, Score) else "failed" for one in results] == [1.0, "failed", 0.0, 1.0]


def test_a_dead_sandbox_is_a_failure_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SandboxPool, "run_many", lambda _, jobs: [SandboxTrouble("the sandbox died")] * len(jobs))
        assert failed(DOUBLE, STDIO) == "reward code: the sandbox died"
    assert scored(DOUBLE, STDIO).value == 1.0


def test_refuses_to_run_unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SandboxPool(walls="none")
    with pytest.raises(ValueError, match="cannot isolate programs.*files.*allow_unprotected: true"):
        pool.start()
    allowed = SandboxPool(allow_unprotected=True, walls="none")
    try:
        assert "missing: files" in allowed.start().describe()
    finally:
        allowed.close()


def test_the_registry_builds_and_warms_it() -> None:
    reward = build_reward(RewardConfig(name="code", args={"mode": "expression", "must_contain": ["+"]}))
    reward.warm()
    assert score_of(reward, sample("1 + 1", "2")).value == 1.0
    with pytest.raises(ValueError, match=r"reward\.args\.score"):
        build_reward(RewardConfig(name="code", args={"score": "most"}))
    with pytest.raises(ValueError, match="needs no-such-compiler, which is not installed here"):
        known_languages(["own"], {"own": Language(file="main.x", run=["no-such-compiler", "main.x"])}, local=True)


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        *((name, 0, "> 0") for name in ("test_s", "wall_s", "total_s", "memory_mb", "output_kb", "file_mb")),
        *((name, -1, "> 0") for name in ("test_s", "processes", "parallel")),
        ("parallel", 0, "> 0"),
        ("total_s", math.inf, "expected number > 0"),
        ("tolerance", -1, ">= 0"),
        ("languages", [], "at least one"),
        ("languages", ["cobol"], "'cobol' is unknown"),
    ],
)
def test_arguments_out_of_range_are_told_before_a_sample_is_scored(argument: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.args\.{argument} = .*: .*{said}"):
        build_reward(RewardConfig(name="code", args={argument: value}))


def test_languages_of_ones_own_are_checked() -> None:
    own = {"own": {"file": "main.x", "run": ["x"]}}
    build_reward(RewardConfig(name="code", args={"languages": ["own"], "commands": own}))
    with pytest.raises(ValueError, match=r"^reward\.args\.commands\.own\.run: is missing; expected list of \(text\)"):
        build_reward(RewardConfig(name="code", args={"languages": ["own"], "commands": {"own": {"file": "main.x"}}}))


# ---------------------------------------------------------------- remote


def test_a_remote_that_is_down_is_a_failure() -> None:
    backend = RemoteBackend(url="http://127.0.0.1:9/run_code", retries=1)
    assert "no answer after 2 attempts" in failed(DOUBLE, STDIO, backend=backend)
    code_backends.backend_of.cache_clear()


# ---------------------------------------------------------------- parts


def test_extraction() -> None:
    assert extract_code("a\n```python\nx\n```\nb\n```py\ny\n```\n", "auto") == ("y\n", "python")
    assert extract_code("~~~\nx\n~~~", "auto") == ("x\n", "")
    assert extract_code("plain", "auto") == ("plain", "") and extract_code("plain", "fenced") is None
    assert extract_code("```python\ncut off", "auto") == ("cut off", "python") and extract_code("  ", "auto") is None
    assert extract_code("x = 1\n```\nThat was it.", "auto") is None and extract_code("```python\n", "auto") is None
    assert extract_code("```\nx\n```", "whole") == ("```\nx\n```", "")


@pytest.mark.parametrize(
    "after",
    [
        *(
            "Output:\n```\n[3]\n```",
            "```text\n[3]\n```",
            "```bash\npython main.py\n```",
            "```python\nprint(f([1, 2]))\n```",
            "```output\ncut",
        ),
        *("```python\nresult = f([1, 2])\n```", "```python\nfrom solution import f\nf([])\n```", "```\nprint(f([1]))\n```"),
    ],
)
def test_what_follows_the_program_is_not_the_program(after: str) -> None:
    response = f"Thus:\n```python\ndef f(x): return sum(x)\n```\n{after}"
    for answer in (CALLS, HUMAN_EVAL, "assert f([1, 2]) == 3"):
        assert scored(response, answer, languages=["python", "bash"]).value == 1.0


def test_of_several_programs_the_last_that_fits_counts() -> None:
    languages = ["python", "c++"]
    assert extract_code("```py\na\n```\n```cpp\nb\n```\n```text\nc\n```\n```\nd\n```", "auto", languages) == ("b\n", "c++")
    assert extract_code("```\na\n```\n```\nb\n```\n```text\nc\n```", "auto", languages) == ("b\n", "")
    assert extract_code("```rust\na\n```\n```text\nc\n```", "auto", languages) == ("c\n", "text")
    drafts = "```python\ndef f(x): return 1\n```\nno:\n```python\ndef f(x): return 2\n```\n```python\nf == 3\n```"
    assert extract_code(drafts, "auto", languages, ["f"]) == ("def f(x): return 2\n", "python")
    parts = "```python\nclass A: pass\nf: int = 3\n```\n```python\nclass A: pass\n```"
    assert extract_code(parts, "auto", languages, ["f", "A"]) == ("class A: pass\nf: int = 3\n", "python")
    assert extract_code("```\ndef f(): pass\n```\n```python\nf()\n```", "auto", languages, ["f"]) == ("def f(): pass\n", "")


def test_fences_in_lists_and_longer_ones() -> None:
    listed = '1. So:\n   ```python\n   def f():\n       return """a\n b"""\n   ```\n2. Done'
    assert extract_code(listed, "auto") == ('def f():\n    return """a\nb"""\n', "python")
    assert extract_code("    ```python\ndef f():\n    return 1\n```", "auto") == ("def f():\n    return 1\n", "python")
    assert extract_code("````python\n```\nx\n````", "auto") == ("```\nx\n", "python")


@pytest.mark.parametrize("text", ["```" + " " * 60_000 + "`", "~~~" + "a" * 60_000 + "`", "`" * 60_000 + " x `"])
def test_no_fence_takes_long_to_read(text: str) -> None:
    started = time.thread_time()
    extract_code(text, "auto", ["python"])
    assert time.thread_time() - started < 1


def test_a_program_stands_after_the_thinking() -> None:
    assert scored(f"<think>\n```python\nprint(0)\n```\n</think>\n{DOUBLE}", STDIO).value == 1.0
    assert scored(f"```python\n{DOUBLE}\n```\n</think>\n```python\nprint(0)\n```", STDIO).value == 0.0
    assert scored(f"<think>\n```python\n{DOUBLE}\n```\n</think>\n", STDIO).details["verdict"] == "no program found"


def test_a_program_in_another_language_than_its_tests_is_wrong() -> None:
    both = scored("```bash\necho 3\n```", CALLS, languages=["python", "bash"])
    assert (both.value, both.details["verdict"]) == (0.0, "a program in bash, expected python")
    assert "function calls and asserts are for python only" in failed("```bash\necho 3\n```", CALLS, languages=["bash"])


def test_comparisons() -> None:
    assert same_output("1 2\n3\n", "1 2  \n3\n\n", "lines", 0) and not same_output("1 2", "1  2", "lines", 0)
    assert same_output("0.5\nYES", "0.50000\nYES\n", "auto", 1e-6) and not same_output("0.5", "0.5000", "lines", 1e-6)
    assert (
        not same_output("0.5", "0.51", "auto", 1e-6)
        and not same_output("1", "1.0", "auto", 1e-6)
        and not same_output("1 2", "1\n2", "auto", 0)
    )
    assert same_output("3", "3.0000000001", "numeric", 1e-6) and not same_output("500000500000", "500000000000.0", "numeric", 1e-6)
    assert same_output("1 2", "1 2", "exact", 0) and not same_output("1 2", "1 2\n", "exact", 0)
    assert same_output("0.333333 yes", "0.3333333\nyes", "numeric", 1e-5) and not same_output("1 yes", "1 no", "numeric", 1e-5)
    assert same_value([1, [2.0]], (1, (2,)), 1e-9) and same_value({"1": "a"}, {1: "a"}, 0) and same_value(10**30, 10**30, 0)
    assert not same_value(1, True, 0) and not same_value("1", 1, 0) and not same_value([1], [1, 2], 0) and not same_value(0, None, 0)
    assert not same_value(10**16, 10**16 + 1, 1e-6) and not same_value(1.0, 10**400, 1e-6)


def test_small_numbers_are_compared_by_their_size() -> None:
    assert not same_value(1e-9, 2e-9, 1e-6) and same_value(1e-9, 1.0000001e-9, 1e-6) and not same_value(0.0, 1e-9, 1e-6)
    assert same_value(0.0, math.sin(math.pi), 1e-6) and not same_value(0.0, math.sin(math.pi), 0)
    assert same_output("0.0", "0.0000001", "numeric", 1e-6) and not same_output("0.0", "0.00001", "numeric", 1e-6)


def test_integers_are_compared_exactly() -> None:
    assert not same_output("123456789", "123456790", "numeric", 1e-6) and same_output("+7 123456789.0", "7 123456790", "numeric", 1e-6)
    assert not same_value(123456789, 123456790, 1e-6) and same_value(123456789.0, 123456790.0, 1e-6)
    assert not same_value(123456789, 123456790.0, 1e-6) and same_value(3, 3.0000000000000004, 1e-6) and same_value(10**20, 1e20, 1e-6)
    assert not any(same_value(sum(range(n + 1)), n * n / 2, 1e-6) for n in (10, 10**3, 10**6))


def test_numbers_sets_and_sequences_of_other_types() -> None:
    assert same_value(0.5, Fraction(1, 2), 1e-6) and same_value(3, Decimal("3.0"), 1e-6) and not same_value(0.5, Fraction(1, 3), 1e-6)
    assert same_value([0, 1], range(2), 0) and same_value([1], deque([1]), 0) and not same_value([0, 1], range(10**12), 0)
    assert same_value({1, 2}, frozenset({2, 1}), 0) and not same_value([1], {1}, 0) and not same_value("ab", ["a", "b"], 0)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 10**50, -(2**70), 1.5, "x\ud83d", b"\0a", 1 + 2j, [1, (2, {3})], {(1, 2): {"a": []}}, range(3), Decimal("0.10")],
)
def test_values_survive(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert again == value and type(again) is type(value)
    assert str(decode(json.loads(json.dumps(encode([float("nan"), float("inf")]))))) == "[nan, inf]"


BAD_MADE = [
    {"o": [name, args]} for name, args in [("Fraction", [1, 0]), ("Decimal", ["x"]), ("eval", ["1"]), ("date", [0, 0, 0]), ("date", [])]
]
LARGE = {"o": ["range", [0, 10**12, 1]]}
BAD_MADE += [{"o": [name, [large]]} for name in ("frozenset", "deque", "Counter", "OrderedDict", "bytearray") for large in (LARGE, 1 << 40)]


@pytest.mark.parametrize("data", [{"r": 0}, {"x": 1}, {}, {"i": 3}, {"s": [[1]]}, {"d": [1]}, {"a": 1, "b": 2}, {"a": 1}, *BAD_MADE])
def test_what_is_no_value_is_told(data: Any) -> None:
    with pytest.raises(ValueError):
        decode(data)


@pytest.mark.slow
def test_a_thousand_samples_with_planted_trouble() -> None:
    spec = importlib.util.spec_from_file_location("reward_code_bench", ROOT / "bench" / "reward_code.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    report = bench.account(1000)
    assert (report["accounted"], report["wrong"], report["failed"]) == (1000, 0, 0)


def test_samples_that_sleep_take_no_other_with_them() -> None:
    """A list's time limit is for the samples that run side by side, not for all of the list."""
    args = {"test_s": 0.3, "wall_s": 1.5, "total_s": 0.5}
    scorer, _ = BatchScorer.of(RewardConfig(name="code", timeout_s=4.0, args=args), "reward")
    items = [sample("import time\ntime.sleep(60)", STDIO)] * 4 + [sample(DOUBLE, STDIO)]
    scored = scorer(dict(enumerate(items)), 60.0)
    assert not scored.suspects and not scored.interrupted
    assert [one.value if isinstance(one, Score) else one for one in scored.results.values()] == [0.0] * 4 + [1.0]
