"""Programs on their way through their tests, in rounds, and the verdicts of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll_lite.data.samples import Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.backends import Backend
from roll_lite.rewards.code.compare import Compare, same_output, same_value
from roll_lite.rewards.code.languages import Language
from roll_lite.rewards.code.tests import Test
from roll_lite.sandbox.pool import Ended, Limits, Outcome, Pair, Program, SandboxTrouble
from roll_lite.sandbox.values import decode, encode

COMPILE = Limits(cpu_s=20.0, wall_s=60.0, memory_mb=2048, output_kb=16 * 1024, file_mb=32, folder_mb=256)
CLOCK = 3.0
"""Times as much as computing time: others compute as well."""
SHOWN = 160
LONGEST_CODE = 4000


@dataclass
class Attempt:
    """A sample's program on its way through the tests."""

    source: str
    language: Language | None
    tests: list[Test]
    is_expression: bool
    prelude: str = ""
    passed: int = 0
    done: int = 0
    spent_s: float = 0.0
    """Computing time, or a third of the time by the clock where that is more."""
    verdict: str = ""
    """Of the first test that failed."""
    failure: RewardFailed | None = None
    artifact: bytes = b""
    over: bool = False

    def fail(self, verdict: str) -> None:
        self.verdict = self.verdict or f"test {self.done}: {verdict}"

    def result(self, fraction: bool) -> Score | RewardFailed:
        if self.failure is not None:
            return self.failure
        correct = self.passed == len(self.tests)
        value = self.passed / len(self.tests) if fraction else float(correct)
        details: dict[str, float | str] = {
            "extracted": self.source[:LONGEST_CODE],
            "verdict": self.verdict or "passed",
            "passed": self.passed,
            "tests": len(self.tests),
        }
        return Score(value, correct, details)


@dataclass
class Rounds:
    limits: Limits
    compare: Compare
    tolerance: float
    total_s: float
    fail_fast: bool
    _jobs: list[tuple[Attempt, Test]] = field(default_factory=list)

    def run(self, backend: Backend, attempts: Sequence[Attempt]) -> None:
        """In rounds of one test of every sample, so that a sample ends with its first failure and samples run side by side."""
        self._compile(backend, [one for one in attempts if one.language is not None and one.language.compile])
        waiting = [one for one in attempts if not one.over and one.failure is None]
        while waiting:
            jobs = [self._job(one, one.tests[one.done]) for one in waiting]
            for attempt, ended in zip(waiting, backend.run_many(jobs), strict=True):
                self._note(attempt, attempt.tests[attempt.done], ended)
            waiting = [one for one in waiting if not one.over and one.failure is None and one.done < len(one.tests)]

    def _compile(self, backend: Backend, attempts: Sequence[Attempt]) -> None:
        jobs = []
        for one in attempts:
            assert one.language is not None
            order = {"kind": "exec", "files": {one.language.file: one.source}, "command": one.language.compile, "keeps_result": True}
            limits = replace(COMPILE, cpu_s=min(COMPILE.cpu_s, self.total_s), wall_s=min(COMPILE.wall_s, CLOCK * self.total_s))
            jobs.append(Program(order, limits=limits))
        for attempt, ended in zip(attempts, backend.run_many(jobs) if jobs else [], strict=True):
            if isinstance(ended, SandboxTrouble):
                attempt.failure = RewardFailed(f"reward code: {ended}")
                continue
            attempt.spent_s += max(ended.cpu_s, ended.seconds / CLOCK)
            if ended.exit != 0 or ended.stopped or not ended.result:
                attempt.verdict = f"does not compile: {_LIMITS.get(ended.stopped) or _tail(ended.stderr)}"
                attempt.over = True
            else:
                attempt.artifact = ended.result

    def _job(self, attempt: Attempt, test: Test) -> Program | Pair:
        language = attempt.language
        left = max(0.05, self.total_s - attempt.spent_s)
        limits = replace(self.limits, cpu_s=min(self.limits.cpu_s, left), wall_s=min(self.limits.wall_s, CLOCK * left))
        limits = replace(limits, output_kb=max(limits.output_kb, _needed_kb(test)))
        if attempt.is_expression:
            return Program({"kind": "expression", "source": attempt.source}, limits=limits)
        source = {"source": attempt.source, "prelude": attempt.prelude}
        if test.function is not None:
            call = {"function": test.function, "args": encode(test.args), "kwargs": encode(test.kwargs)}
            return Program({"kind": "call", **source, **call}, limits=limits)
        if test.source is not None:
            tests = {"kind": "tests", "source": test.source, "names": test.names, "modules": test.modules}
            return Pair(Program({"kind": "serve", **source}, limits=limits), Program(tests, limits=limits))
        if language is None:
            return Program({"kind": "script", **source}, test.stdin.encode(), limits=limits)
        files = {} if language.compile else {language.file: attempt.source}
        order = {"kind": "exec", "files": files, "command": language.run, "artifact": language.artifact if language.compile else ""}
        return Program(order, test.stdin.encode(), attempt.artifact, language.address_space, limits)

    def _note(self, attempt: Attempt, test: Test, ended: Ended) -> None:
        attempt.done += 1
        if isinstance(ended, SandboxTrouble):
            attempt.failure = RewardFailed(f"reward code: {ended}")
            return
        if test.source is not None and (cannot := _cannot(ended)):
            attempt.failure = RewardFailed(f"reward code: test {attempt.done}: the harness cannot do this: {cannot}")
            return
        attempt.spent_s += max(ended.cpu_s, ended.seconds / CLOCK)
        verdict = self._verdict(attempt, test, ended)
        if verdict:
            attempt.fail(verdict)
            attempt.over = self.fail_fast
        else:
            attempt.passed += 1
        if attempt.spent_s > self.total_s and attempt.done < len(attempt.tests):
            attempt.done += 1
            attempt.fail(f"no time left: all tests together have {self.total_s:g} s")
            attempt.over = True

    def _verdict(self, attempt: Attempt, test: Test, ended: Outcome) -> str:
        """Empty where the test is passed."""
        if ended.stopped:
            return _LIMITS[ended.stopped]
        if test.source is not None:
            return _tests_verdict(ended)
        if attempt.is_expression or test.function is not None:
            return self._value_verdict(attempt, test, ended)
        if ended.exit != 0:
            return f"exit status {ended.exit}: {_tail(ended.stderr)}"
        printed = ended.stdout.decode("utf-8", errors="replace")
        if same_output(test.expected, printed, self.compare, self.tolerance):
            return ""
        return f"printed {printed!r:.{SHOWN}}, expected {test.expected!r:.{SHOWN}}"

    def _value_verdict(self, attempt: Attempt, test: Test, ended: Outcome) -> str:
        result = _json(ended.result)
        if ended.exit != 0 or not isinstance(result, dict) or "value" not in result:
            return f"no value: {_tail(ended.stderr) or f'exit status {ended.exit}'}"
        try:
            value = decode(result["value"])
            if value is None and "changed" in result and _works_in_place(attempt.tests):
                value = decode(result["changed"])
            same = any(same_value(one, value, self.tolerance) for one in (test.expected, *test.also))
            return "" if same else f"value {value!r:.{SHOWN}}, expected {test.expected!r:.{SHOWN}}"
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            return f"no value: {type(error).__name__}"


def _works_in_place(tests: Sequence[Test]) -> bool:
    """Functions without a value, as LeetCode has them, whose first argument becomes what is expected: doing nothing must not be enough."""
    given = [test.args[0] if test.args else None for test in tests]
    return all(isinstance(one, list) and isinstance(test.expected, list) for one, test in zip(given, tests, strict=True)) and any(
        one != test.expected for one, test in zip(given, tests, strict=True)
    )


def _needed_kb(test: Test) -> int:
    """To say what is expected, and a little more."""
    if isinstance(test.expected, str):
        return len(test.expected.encode(errors="replace")) * 2 // 1024
    return len(json.dumps(encode(test.expected))) * 2 // 1024


def _tests_verdict(ended: Outcome) -> str:
    """Of asserts. Where the program ended early, with what it said."""
    verdict = _json(ended.result)
    if not isinstance(verdict, dict):
        return "failed: the tests did not end"
    if ended.exit == 0 and verdict.get("value") is True:
        return ""
    said = _tail(ended.stderr) if "the program ended" in str(verdict.get("error")) else ""
    return f"failed: {verdict.get('error')}{f': {said}' if said else ''}"


def _cannot(ended: Outcome) -> str:
    """Why the asserts say nothing about the program; empty where they do."""
    verdict = _json(ended.result)
    return str(verdict["cannot"])[:SHOWN] if isinstance(verdict, dict) and "cannot" in verdict else ""


_LIMITS = {
    "cpu": "time limit: too much computing",
    "wall": "time limit: did not end",
    "memory": "memory limit",
    "processes": "limit of processes",
    "output": "output limit",
    "sandbox": "ended its sandbox",
}


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _tail(stderr: bytes) -> str:
    lines = stderr[-2000:].decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:SHOWN] if lines else ""
