from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import Mistakes, rule
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.files import elsewhere, kind_of
from roll_lite.rewards.answer_extraction import after_thinking, is_cut
from roll_lite.rewards.base import RewardFailed, RewardType
from roll_lite.rewards.code.backends import Backend, RemoteBackend, backend_of
from roll_lite.rewards.code.compare import Compare
from roll_lite.rewards.code.languages import Extract, Language, extract_code, known_languages
from roll_lite.rewards.code.rounds import LONGEST_CODE, WALL_PER_CPU, Attempt, Rounds
from roll_lite.rewards.code.tests import Test, tests_of
from roll_lite.sandbox.pool import Limits, SandboxPool

OF_THE_POOL = ("parallel", "allow_unprotected", "readable", "python_path")


def _is_python(text: str) -> str:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"is no Python: line {error.lineno}: {error.msg}; no program would run behind it") from error
    return text


class CodeReward(RewardType):
    """Score 1 if the response's program passes all tests, else 0, or the share of passed tests (`score: fraction`). Programs run in
    sandboxes; their results are judged outside. [code_reward.md](code_reward.md) describes test layouts, asserts, and what programs see.

    The program is searched for after the last `</think>`. Of several code blocks, the last one labelled with one of `languages` counts,
    else the last without a label. If tests call functions, the block that defines the most of them counts. A block cut off by a stop text
    extends to the end.

    ```yaml
    reward:
      name: code
      args: {languages: [python], score: fraction, test_s: 4, total_s: 12, memory_mb: 256}
      workers: 4
      timeout_s: 60
    ```
    """

    reads_answer_first = True
    unshown = ("backend",)

    mode: Literal["tests", "expression"] = "tests"
    """tests: the response is a program; its tests are in the answer or `column`. expression: the response is a Python expression, whose
    value must equal the answer."""
    column: str | None = None
    """Column with the tests; default: the answer."""
    commands: dict[str, Language] = Field(default_factory=dict)
    """Further languages by name: `file`, the program's file name; `run`, its command; `compile`, the optional compiler command."""
    languages: Annotated[tuple[str, ...], Field(min_length=1)] = ("python",)
    """Languages that responses may use; the code block's label selects one."""
    extract: Extract = "auto"
    """Program in the response. fenced: a code block. whole: the whole response. auto: a block if there is one, else the whole response."""
    prelude: Annotated[str, AfterValidator(_is_python)] = ""
    """Python code to run before the program, such as imports that a data set presupposes: `from typing import *`."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if all tests pass. fraction: the share that passes."""
    fail_fast: bool | None = None
    """Stop at the first failed test; null: only with `score: all`."""
    compare: Compare = "auto"
    """Comparison of output. exact: by character. lines: by line. numeric: numbers with a tolerance. auto: by line, decimals as numbers."""
    tolerance: NonNegativeFloat = 1e-6
    """Maximum error of decimal numbers. Return values: relative. Printed output (compare: numeric or auto): relative or absolute, whichever
    allows more; only absolute if the expected number is an integer."""
    must_contain: tuple[str, ...] = ()
    """Texts that the program must contain."""
    forbid: tuple[str, ...] = ()
    """Texts that the program must not contain."""
    test_s: PositiveFloat = 3.0
    """CPU time limit of one test."""
    wall_s: PositiveFloat | None = None
    """Wall-clock time limit of one test; default: three times `test_s`."""
    total_s: PositiveFloat = 8.0
    """CPU time limit of compiling and testing one sample. The wall-clock limit is three times as long, and must be less than the
    reward's `timeout_s`."""
    memory_mb: PositiveInt = 512
    """Memory limit of a program."""
    output_kb: PositiveInt = 1024
    """Maximum output of a program."""
    file_mb: PositiveInt = 16
    """Largest file that a program may write."""
    processes: PositiveInt = 64
    """Maximum processes of a program."""
    parallel: PositiveInt = 1
    """Programs that one worker runs at the same time."""
    readable: tuple[str, ...] = ()
    """Folders that programs may read."""
    python_path: tuple[str, ...] = ()
    """Folders that Python programs may import from."""
    backend: RemoteBackend | None = None
    """SandboxFusion server for the programs: {name: sandbox_fusion, url, api_key_env, concurrency, timeout_s, retries}."""
    allow_unprotected: bool = False
    """Run programs even if they cannot be isolated."""

    @rule
    def _are_known(self) -> Mistakes:
        try:
            known_languages(self.languages, self.commands, local=False)
        except ValueError as error:
            yield "languages", str(error)

    def __call__(self, samples: list[RewardInput]) -> list[Score | RewardFailed]:
        known = known_languages(self.languages, self.commands, self.backend is None)
        wall = WALL_PER_CPU * self.test_s if self.wall_s is None else self.wall_s
        limits = Limits(self.test_s, wall, self.memory_mb, self.output_kb, self.file_mb, processes=self.processes)
        fail_fast = self.score == "all" if self.fail_fast is None else self.fail_fast
        rounds = Rounds(limits, self.compare, self.tolerance, self.total_s, fail_fast)
        attempts = [self._attempt(sample, known) for sample in samples]
        rounds.run(self._backend(), [one for one in attempts if isinstance(one, Attempt)])
        return [one.result(self.score == "fraction") if isinstance(one, Attempt) else one for one in attempts]

    def warm(self) -> None:
        if self.backend is None:
            trial = CodeReward(mode="expression", **{name: getattr(self, name) for name in ("languages", "commands", *OF_THE_POOL)})
            [first] = trial([RewardInput("", "", "1 + 1", 2, {}, "stop")])
            if isinstance(first, RewardFailed):
                raise first

    def at_once(self) -> int:
        return self.parallel if self.backend is None else self.backend.concurrency

    def describe(self) -> str:
        runner = self._backend()
        return f"programs run in a sandbox; {runner.describe()}" if isinstance(runner, SandboxPool) else "programs run in a remote sandbox"

    def longest_s(self) -> dict[str, float]:
        """Limit of all tests. If `timeout_s` expired first, a slow program's sample would fail instead of scoring 0."""
        return {"total_s": WALL_PER_CPU * self.total_s}

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        yield from super().in_run(config, place, timeout_s)
        if self.backend is not None:
            return  # a remote sandbox has its own Python and folders
        for name in ("readable", "python_path"):
            for folder in getattr(self, name):
                if kind_of(Path(folder)) is None:
                    yield Problem(f"{place}.args.{name}", f"no such folder: {folder}{elsewhere(Path(folder))}", list(getattr(self, name)))

    def needs_answer(self) -> bool:
        return self.mode == "expression" or self.column is None

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"column": (self.column,)} if self.column is not None and self.mode == "tests" else {}

    def response_for(self, answer: Any) -> str | None:
        if answer is None or self.mode == "tests" or self.must_contain or self.forbid:
            return None
        return repr(answer) if _value(answer) is answer else str(answer)

    def _backend(self) -> Backend:
        return backend_of(self.backend, *(getattr(self, name) for name in OF_THE_POOL))

    def _attempt(self, sample: RewardInput, languages: dict[str, Language | None]) -> Attempt | Score | RewardFailed:
        is_expression = self.mode == "expression"
        try:
            tests = [Test(function="value", expected=_value(sample.answer))] if is_expression else tests_of(sample, self.column)
        except RewardFailed as failure:
            return failure
        needed = {name for test in tests for name in test.needs() if not is_expression}
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
        wrong = [f"lacks {piece!r}" for piece in self.must_contain if piece not in source]
        wrong += [f"has {piece!r}" for piece in self.forbid if piece in source]
        if wrong:
            return Score(0.0, False, shown | {"verdict": wrong[0]})
        if is_expression:
            return Attempt(source, f"value = lambda: eval({source.strip()!r}, {{}})", None, tests)
        language = languages[tag] if tag in languages else next(iter(languages.values()))
        return Attempt(source, source, language, tests, self.prelude)


def _value(answer: Any) -> Any:
    if not isinstance(answer, str):
        return answer
    try:
        return ast.literal_eval(answer.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return answer
