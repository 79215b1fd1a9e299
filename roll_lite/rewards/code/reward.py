"""Reward `code`: the response's program passes the sample's tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from roll_lite.config.files import elsewhere, kind_of
from roll_lite.config.problems import Problem, first_line
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import after_thinking, is_cut
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.backends import Backend, RemoteBackend, backend_of
from roll_lite.rewards.code.compare import Compare
from roll_lite.rewards.code.languages import Extract, Language, extract_code, known_languages
from roll_lite.rewards.code.rounds import CLOCK, LONGEST_CODE, Attempt, Rounds
from roll_lite.rewards.code.tests import Test, tests_of
from roll_lite.rewards.references import expression_worth, no_expression
from roll_lite.rewards.reward_type import RewardType, too_slow
from roll_lite.sandbox.pool import Limits, SandboxPool

OF_THE_POOL = ("parallel", "allow_unprotected", "readable", "python_path")
"""Arguments that the sandboxes of a process are for."""


class CodeReward(RewardType):
    """The response's program passes the sample's tests: 1 where it passes all, or the share of those that pass (`score: fraction`).
    Programs run in sandboxes; what they did is judged outside of them.

    The program is looked for after the thinking (`</think>`). Of several code blocks it is the last in one of `languages`, else the last
    without a label; where the tests call functions, the last of them that defines these. So an example of its use, its output or a command
    may follow it. A block that a stop text has ended goes on to the end.

    The tests of a sample, in its answer or in `column`, as a list, a mapping or JSON text:

    | layout | a test is |
    |---|---|
    | `[{"stdin": "3 4", "stdout": "7"}, ...]`, `[{"input": ..., "output": ...}]` with `testtype: stdin` | a run of the program |
    | `{"inputs": [...], "outputs": [...]}` (APPS, TACO) | a run for each; a call of the function with `fn_name` |
    | `[{"args": [3, 4], "expected": 7}, ...]` with `fn_name` there or in a column of the data | a call |
    | `["assert add(3, 4) == 7", ...]`, `{"test_list": [...], "test_setup_code": ...}` (MBPP) | asserts about the program |
    | `from solution import add` and functions `test_...` (KodCode) | each of the functions |
    | `{"test": "def check(candidate): ...", "entry_point": "add"}` (HumanEval), or columns of these names | its check function |

    `fn_name` may also stand as `func_name` in the column `metadata` (LiveCodeBench). As APPS has them, where all of a sample's expected
    values stand in lists of their own (`[[5], [7]]`), the values alone (`5`, `7`) count as well. Values are compared as JSON has them:
    tuples, ranges, iterators and views of dicts are lists. Integers have to be equal; other numbers may have a relative error of
    `tolerance`, and 1e-12 about zero. Numbers in output (`compare: numeric`, and decimals with `auto`) may have an absolute or a relative
    error of `tolerance`; with `auto` the absolute error is at most a hundredth of the number, so that 1e-9 is not 2e-9.

    Each call runs in a process of its own, which has run the program: what one call leaves behind, the next does not find.

    **Asserts** run in a sandbox of their own, which holds no line of the program. They call the program's functions with plain values, get
    plain values back, and decide. So a program decides no comparison and cannot forge a verdict. All asserts of a sample share the
    program's process: they may rely on what an earlier one has changed there. What follows:

    - The names that the tests use and neither define nor import are the program's. Modules (`math.pi`) are Python's own also without an
      import, and so are Python's built-in names, except for the `entry_point`, or where tests call nothing but one of these (`assert
      sum(10, 15) == 6`). Helpers that decide (`is_close(f(1), 2)`) belong into the tests: left to the program, they are forged.
    - Plain values are numbers, text, bytes, lists, tuples, sets, dicts, ranges, arrays of numpy, `Decimal`, `Fraction`, `date`, `time`,
      `datetime`, `timedelta`, `deque`, `Counter` and `OrderedDict`; subclasses of these cross as the data that they hold, iterators as the
      items that they give, at most 100,000. Values are copies; a list, dict, set or bytearray that a function changes in its arguments
      changes in the tests as well. Exceptions cross as the nearest of Python's own kinds, with their arguments and text.
    - Any other object stays with the program. The tests can pass it back or call it; it has no operators and equals nothing else. So
      an object with an `__eq__` or `__sub__` of its own fails `f(1) == 5` and `abs(f(1) - 5) < 1e-3`.
    - unittest classes, and classes `Test...` with methods `test_...`, run as a test runner would run them. What takes a test runner's
      fixtures is a failure, and so is a module that is not there (`python_path`).

    **Inside.** Some tests take more than calls with plain values: those that use the program's classes (names with a capital, but for
    `Solution`) and exceptions, give it functions, await coroutines, ask for identity, patch or redirect. Whether a test does is read from
    the test alone, never from the response. Such a test runs in the program's own process once the program has been run; its verdict comes
    with a secret that the program was not given. The program's operators count as little as possible there: a comparison of its object with
    a plain value goes by the data that the object holds, two of its objects are equal if their class says so and their attributes are
    equal, another operator that sees a plain value and gives one fails the test, and an assert that failed stays failed whatever swallows
    it. A program that is made to attack its own interpreter can still forge such a verdict. `inside` in the sample's details is the number
    of tests decided that way.

    **What programs find.** Python's own library, the system's programs and libraries, an empty folder of their own, and what `readable`
    and `python_path` name: nothing else below /usr, no installed packages, nothing of the project. What multiprocessing
    shares is in a /dev/shm of their own behind mount namespaces, and in that folder where landlock alone keeps them apart; its managers
    take sockets, which no program has. Other memory that processes share has to be in a file. All of a program may use `memory_mb`; a
    process may have twice that as address space. `processes` counts threads, too. It may print twice what is expected, where that is more
    than `output_kb`.

    **What counts.** Where cgroup v2 lets a sandbox make a group (root, or an ordinary user whose group was delegated, as by `systemd-run
    --user --scope`), the kernel counts computing time there, and memory and processes where it gives these to a group; the line about the
    code sandbox in the log says which. Elsewhere the sandbox looks some twenty times a second; of processes that live more shortly it
    estimates what they compute. Without mount namespaces the size of a program's folder is looked at, too, as soon as the disk fills.

    **What is refused**, beside the network and other processes: `flock`, leases and watches on files, flags of files, shared memory,
    semaphores and queues outside of the program's own folder, `fallocate` without mount namespaces.

    **A sandbox elsewhere** (`backend`) is a [SandboxFusion](https://github.com/bytedance/SandboxFusion) server, with the URL of its
    `/run_code`: programs, calls, asserts and all languages mean the same there, as long as its image has Python 3.10 or later and the
    languages' compilers. A program gets a fresh interpreter, which never held its tests. Both are processes of one sandbox there, so that a
    program that is made to attack the tests is held off less well than here.

    ```yaml
    reward:
      name: code
      args: {languages: [python], score: fraction, test_s: 4, total_s: 12, memory_mb: 256}
      workers: 4
      timeout_s: 60
    ```
    """

    reads_answer_first = True

    mode: Literal["tests", "expression"] = "tests"
    """tests: the response is a program, and its tests stand in the answer or in `column`. expression: it is a Python expression, whose
    value is compared with the answer."""
    column: str | None = None
    """Column of the data that holds the tests, where the answer does not."""
    commands: dict[str, Language] = Field(default_factory=dict)
    """Further languages by name: `file` that holds the program, `run`, the command that runs it, and where it is compiled `compile`."""
    languages: Annotated[tuple[str, ...], Field(min_length=1)] = ("python",)
    """Which the response may be written in; of several, the code block's label decides."""
    extract: Extract = "auto"
    """Where the program stands. fenced: in a code block. whole: the response is nothing else. auto: in a block, else all of it."""
    prelude: str = ""
    """Python that stands before the program, such as the imports that a data set takes for granted: `from typing import *`."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 where all tests pass. fraction: the share that passes."""
    fail_fast: bool | None = None
    """Stop at the first test that fails; where absent, if score is all."""
    compare: Compare = "auto"
    """Output is the same to the character, line by line, in its numbers, or (auto) line by line with decimals as numbers."""
    tolerance: NonNegativeFloat = 1e-6
    """Of numbers that are no integers: relative for values, relative or absolute for output."""
    must_contain: tuple[str, ...] = ()
    """Texts that the program must hold."""
    forbid: tuple[str, ...] = ()
    """Texts that it must not hold."""
    test_s: PositiveFloat = 3.0
    """Computing time of one test."""
    wall_s: PositiveFloat | None = None
    """Its time by the clock; three times test_s where absent."""
    total_s: PositiveFloat = 8.0
    """Computing time of all tests of a sample, and of compiling it. By the clock they have three times as much, which has to be less than
    the reward's `timeout_s`."""
    memory_mb: PositiveInt = 512
    """Memory of a program."""
    output_kb: PositiveInt = 1024
    """Most that it may print."""
    file_mb: PositiveInt = 16
    """Largest file that it may write."""
    processes: PositiveInt = 64
    """Most processes that it may have."""
    parallel: PositiveInt = 1
    """Programs that one worker runs at the same time."""
    readable: tuple[str, ...] = ()
    """Folders that programs may read."""
    python_path: tuple[str, ...] = ()
    """Folders that Python programs may import from."""
    backend: RemoteBackend | None = None
    """A SandboxFusion server: {kind: sandbox_fusion, url, api_key_env, concurrency, timeout_s, retries}."""
    allow_unprotected: bool = False
    """Run programs also where they cannot be isolated."""

    @field_validator("languages")
    @classmethod
    def _are_known(cls, languages: tuple[str, ...], others: ValidationInfo) -> tuple[str, ...]:
        """Whether they are installed is for the machine to say that runs them."""
        if "commands" in others.data:
            known_languages(languages, others.data["commands"], local=False)
        return languages

    @field_validator("forbid")
    @classmethod
    def _can_be_met(cls, forbid: tuple[str, ...], others: ValidationInfo) -> tuple[str, ...]:
        for piece in forbid:
            for wanted in others.data.get("must_contain", ()):
                if piece in wanted:
                    raise ValueError(f"no program can hold {wanted!r} (must_contain) and not {piece!r}; remove one")
        return forbid

    def __call__(self, samples: list[RewardInput]) -> list[Score | RewardFailed]:
        known = known_languages(self.languages, self.commands, self.backend is None)
        wall = CLOCK * self.test_s if self.wall_s is None else self.wall_s
        limits = Limits(self.test_s, wall, self.memory_mb, self.output_kb, self.file_mb, processes=self.processes)
        fail_fast = self.score == "all" if self.fail_fast is None else self.fail_fast
        rounds = Rounds(limits, self.compare, self.tolerance, self.total_s, fail_fast)
        attempts = [self._attempt(sample, known) for sample in samples]
        rounds.run(self._backend(), [one for one in attempts if isinstance(one, Attempt)])
        return [one.result(self.score == "fraction") if isinstance(one, Attempt) else one for one in attempts]

    def warm(self) -> None:
        """Start the sandboxes and see that a program runs."""
        if self.backend is None:
            trial = CodeReward(mode="expression", **{name: getattr(self, name) for name in ("languages", "commands", *OF_THE_POOL)})
            [first] = trial([RewardInput("", "", "1 + 1", 2, {}, "stop")])
            if isinstance(first, RewardFailed):
                raise first

    def at_once(self) -> int:
        return self.parallel if self.backend is None else self.backend.concurrency

    def describe(self) -> str:
        """What keeps the programs apart from everything else."""
        runner = self._backend()
        return f"programs run in a sandbox; {runner.describe()}" if isinstance(runner, SandboxPool) else "programs run in a remote sandbox"

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        """A time-out of the sample would blame the worker for a slow program."""
        yield from too_slow(place, "total_s", self.total_s, CLOCK * self.total_s, timeout_s)
        if "test_s" in self.model_fields_set and self.test_s > self.total_s:
            message = f"is more than all tests of a sample may have (total_s: {self.total_s:g}); use less, or raise that"
            yield Problem(f"{place}.args.test_s", message, self.test_s)
        if self.backend is not None:
            return  # its Python and its folders are its own
        if (wrong := _wrong_python(self.prelude)) is not None:
            yield Problem(f"{place}.args.prelude", f"is no Python: {wrong}; no program would run behind it", self.prelude)
        for name in ("readable", "python_path"):
            for folder in getattr(self, name):
                if kind_of(Path(folder)) is None:
                    yield Problem(f"{place}.args.{name}", f"no such folder: {folder}{elsewhere(Path(folder))}", list(getattr(self, name)))

    def needs_answer(self) -> bool:
        return self.mode == "expression" or self.column is None

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"column": (self.column,)} if self.column is not None and self.mode == "tests" else {}

    def no_response(self) -> str | None:
        return no_expression(self.must_contain, self.forbid) if self.mode == "expression" else "tests"

    def response_for(self, answer: Any) -> str | None:
        return expression_worth(answer, self.must_contain)

    def _backend(self) -> Backend:
        return backend_of(self.backend, *(getattr(self, name) for name in OF_THE_POOL))

    def _attempt(self, sample: RewardInput, languages: dict[str, Language | None]) -> Attempt | Score | RewardFailed:
        is_expression = self.mode == "expression"
        try:
            tests = [Test(expected=_value(sample.answer))] if is_expression else tests_of(sample, self.column)
        except RewardFailed as failure:
            return failure
        needed = {name for test in tests for name in test.needs()}
        if needed:
            languages = {name: language for name, language in languages.items() if language is None}
        if not languages:
            return RewardFailed("reward code: function calls and asserts are for python only")
        found = extract_code(after_thinking(sample), self.extract, languages, needed, is_cut(sample))
        if found is None:
            return Score(0.0, False, {"verdict": "no program found"})
        source, tag = found
        shown: dict[str, float | str] = {"extracted": source[:LONGEST_CODE]}
        if tag and tag not in languages and not is_expression:
            return Score(0.0, False, shown | {"verdict": f"a program in {tag}, expected {' or '.join(languages)}"})
        for piece in self.must_contain:
            if piece not in source:
                return Score(0.0, False, shown | {"verdict": f"lacks {piece!r}"})
        for piece in self.forbid:
            if piece in source:
                return Score(0.0, False, shown | {"verdict": f"has {piece!r}"})
        language = languages[tag] if tag in languages else next(iter(languages.values()))
        try:
            source.encode()
        except UnicodeEncodeError:
            return Score(0.0, False, {"verdict": "no text"})
        return Attempt(source, language, tests, is_expression, self.prelude)


def _value(answer: Any) -> Any:
    """A text that reads as a value is that value."""
    if not isinstance(answer, str):
        return answer
    try:
        return ast.literal_eval(answer.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return answer


def _wrong_python(text: str) -> str | None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return first_line(error)
    return None
