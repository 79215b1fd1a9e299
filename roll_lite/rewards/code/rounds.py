from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
WALL_PER_CPU = 3.0
"""Ratio of wall-clock to CPU limits: other processes use the CPUs too."""
MOST_CALLS = 20
SHOWN = 160
LONGEST_CODE = 4000


@dataclass
class Attempt:
    extracted: str
    source: str
    language: Language | None
    tests: list[Test]
    prelude: str = ""
    passed: int = 0
    done: int = 0
    inside: int = 0
    spent_s: float = 0.0
    """CPU seconds charged: per process at least a third of its wall-clock time."""
    verdict: str = ""
    failure: RewardFailed | None = None
    artifact: bytes = b""
    over: bool = False

    @property
    def is_open(self) -> bool:
        return not self.over and self.failure is None and self.done < len(self.tests)

    @property
    def must_compile(self) -> bool:
        return self.language is not None and self.language.compile is not None and not self.artifact

    def fail(self, verdict: str) -> None:
        self.verdict = self.verdict or f"test {self.done}: {verdict}"

    def result(self, fraction: bool) -> Score | RewardFailed:
        if self.failure is not None:
            return self.failure
        correct = self.passed == len(self.tests)
        value = self.passed / len(self.tests) if fraction else float(correct)
        details: dict[str, float | str] = {
            "extracted": self.extracted[:LONGEST_CODE],
            "verdict": self.verdict or "passed",
            "passed": self.passed,
            "tests": len(self.tests),
        }
        if self.inside:
            details["inside"] = self.inside
        return Score(value, correct, details)


@dataclass
class Rounds:
    limits: Limits
    compare: Compare
    tolerance: float
    total_s: float
    fail_fast: bool

    def run(self, backend: Backend, attempts: Sequence[Attempt]) -> None:
        while waiting := [one for one in attempts if one.is_open]:
            groups = [self._group(one) for one in waiting]
            jobs = [self._job(one, group) for one, group in zip(waiting, groups, strict=True)]
            for attempt, group, ended in zip(waiting, groups, backend.run_many(jobs), strict=True):
                self._note(attempt, group, ended)

    def _group(self, attempt: Attempt) -> list[Test]:
        """Choose the tests of the next process. With `fail_fast`, begin with few calls: most wrong programs fail at once."""
        rest = attempt.tests[attempt.done :]
        kind = [(test.function, test.asserts is None) for test in rest]
        alike = next((place for place, one in enumerate(kind) if one != kind[0]), len(kind))
        if rest[0].asserts:
            return rest[:alike]
        return rest[: min(alike, MOST_CALLS, 1 + 3 * attempt.done if self.fail_fast else MOST_CALLS)] if rest[0].function else rest[:1]

    def _job(self, attempt: Attempt, group: list[Test]) -> Program | Pair:
        language, test, several = attempt.language, group[0], len(group)
        if language is not None and attempt.must_compile:
            order = {"kind": "exec", "files": {language.file: attempt.source}, "command": language.compile, "keeps_result": True}
            limits = replace(COMPILE, cpu_s=min(COMPILE.cpu_s, self.total_s), wall_s=min(COMPILE.wall_s, WALL_PER_CPU * self.total_s))
            return Program(order, limits=limits)
        left = max(0.05, self.total_s - attempt.spent_s)
        expected = [one.expected if isinstance(one.expected, str) else json.dumps(encode(one.expected)) for one in group]
        needed_kb = max(self.limits.output_kb, *(len(text.encode(errors="replace")) * 2 // 1024 for text in expected)) + 1
        cpu_s, wall_s = (min(one * several, most) for one, most in ((self.limits.cpu_s, left), (self.limits.wall_s, WALL_PER_CPU * left)))
        limits = replace(self.limits, cpu_s=cpu_s, wall_s=wall_s, output_kb=needed_kb * several)
        source = {"source": attempt.source, "prelude": attempt.prelude}
        each = {"test_s": self.limits.cpu_s, "wall_s": self.limits.wall_s, "most_bytes": needed_kb << 10}
        if test.function is not None:
            calls = encode([[one.args, one.kwargs] for one in group])
            return Program({"kind": "calls", **source, **each, "function": test.function, "calls": calls}, limits=limits)
        if asserts := [one.asserts for one in group if one.asserts]:
            tests = {"kind": "tests", "tests": [asdict(one) for one in asserts], "fail_fast": self.fail_fast, "wall_s": self.limits.wall_s}
            names, imports = ({name for one in asserts for name in getattr(one, field)} for field in ("names", "imports"))
            serve = {"kind": "serve", **source, **each, "names": sorted(names), "imports": sorted(imports)}
            return Pair(Program(serve, limits=limits), Program(tests, limits=limits))
        if language is None:
            return Program({"kind": "script", **source}, test.stdin.encode(), limits=limits)
        files = {} if language.compile else {language.file: attempt.source}
        order = {"kind": "exec", "files": files, "command": language.run, "artifact": language.artifact if language.compile else ""}
        return Program(order, test.stdin.encode(), attempt.artifact, language.address_space, limits)

    def _note(self, attempt: Attempt, group: list[Test], ended: Ended) -> None:
        if isinstance(ended, SandboxTrouble):
            attempt.failure = RewardFailed(f"reward code: {ended}")
            return
        attempt.spent_s += max(ended.cpu_s, ended.seconds / WALL_PER_CPU)
        if attempt.must_compile:
            if ended.exit == 0 and not ended.stopped:
                attempt.artifact = ended.result
            if attempt.must_compile:
                attempt.verdict = f"does not compile: {_LIMITS.get(ended.stopped) or _tail(ended.stderr)}"
                attempt.over = True
            return
        for verdict in self._verdicts(attempt, group, ended):
            attempt.done += 1
            if isinstance(verdict, RewardFailed):
                attempt.failure = RewardFailed(f"reward code: test {attempt.done}: {verdict.cause}")
                return
            attempt.passed += not verdict
            if verdict:
                attempt.fail(verdict)
                attempt.over = self.fail_fast
            if attempt.over:
                return
        if attempt.spent_s > self.total_s and attempt.done < len(attempt.tests):
            attempt.done += 1
            attempt.fail(f"no time left: all tests together have {self.total_s:g} s")
            attempt.over = True

    def _verdicts(self, attempt: Attempt, group: list[Test], ended: Outcome) -> Iterator[str | RewardFailed]:
        """Yield why each test failed; "" if it passed, RewardFailed if it cannot be judged."""
        if not group[0].asserts and not group[0].function:
            expected, printed = group[0].expected, ended.stdout.decode("utf-8", errors="replace")
            if ended.stopped:
                yield _LIMITS[ended.stopped]
            elif ended.exit != 0:
                yield f"exit status {ended.exit}: {_tail(ended.stderr)}"
            elif same_output(expected, printed, self.compare, self.tolerance):
                yield ""
            else:
                yield f"printed {printed!r:.{SHOWN}}, expected {expected!r:.{SHOWN}}"
            return
        said = [_said(line) for line in ended.result.splitlines()][: len(group)]
        for test, one in zip(group, said, strict=False):
            yield _assert_verdict(attempt, one, ended) if test.asserts else self._value_verdict(attempt, test, one)
        if len(said) == len(group) or (said and group[0].asserts and ("stopped" in said[-1] or not ended.stopped)):
            return  # the remaining tests get another process
        if ended.stopped:
            yield _LIMITS[ended.stopped]
            return
        yield from [f"no value: {_tail(ended.stderr) or f'exit status {ended.exit}'}"] * (len(group) - len(said))

    def _value_verdict(self, attempt: Attempt, test: Test, said: dict[str, Any]) -> str:
        if "value" not in said:
            return _LIMITS.get(str(said.get("stopped")), f"no value: {said.get('error', 'no answer')}")
        try:
            value = decode(said["value"])
            if value is None and "changed" in said and _works_in_place(attempt.tests):
                value = decode(said["changed"])
            same = any(same_value(one, value, self.tolerance) for one in (test.expected, *test.also))
            return "" if same else f"value {value!r:.{SHOWN}}, expected {test.expected!r:.{SHOWN}}"
        except (ValueError, TypeError, RecursionError, ArithmeticError) as error:
            return f"no value: {type(error).__name__}"


def _works_in_place(tests: Sequence[Test]) -> bool:
    """True if the tests fit a function that changes its first argument in place, as in LeetCode: first arguments and expected values are
    lists, some different."""
    given = [test.args[0] if test.args else None for test in tests]
    return all(isinstance(one, list) and isinstance(test.expected, list) for one, test in zip(given, tests, strict=True)) and any(
        one != test.expected for one, test in zip(given, tests, strict=True)
    )


def _assert_verdict(attempt: Attempt, said: dict[str, Any], ended: Outcome) -> str | RewardFailed:
    if not said:
        return "failed: the tests did not end"
    if said.get("cannot"):
        return RewardFailed(f"the harness cannot do this: {said['cannot']:.{SHOWN}}")
    attempt.inside += bool(said.get("inside"))
    if said.get("stopped") or (ended.stopped and "ended" in str(said.get("error"))):
        return _LIMITS[said.get("stopped") or ended.stopped]
    last = _tail(ended.stderr) if "the program ended" in str(said.get("error")) else ""
    return f"failed: {said['error']}{f': {last}' if last else ''}" if said.get("error") else ""


_LIMITS = {
    "cpu": "time limit: too much computing",
    "wall": "time limit: did not end",
    "memory": "memory limit",
    "processes": "limit of processes",
    "output": "output limit",
    "sandbox": "ended its sandbox",
}


def _said(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _tail(stderr: bytes) -> str:
    lines = stderr[-2000:].decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:SHOWN] if lines else ""
