"""What docs/rewards.md says beyond signatures and docstrings: a line for each argument, an example in YAML for each type.

Tests hold both against the functions.
"""

SHARED_ARGUMENTS = {
    "url": "Address, or several: each request goes to the one with the fewest under way.",
    "concurrency": "Requests under way at the same time, in each worker.",
    "timeout_s": "Time after which one request counts as failed.",
    "retries": "How often a failed request is tried again, with growing pauses.",
    "api_key_env": "Name of the environment variable that holds the key.",
    "api_key_header": "Header that carries the key; with Authorization it is sent as a bearer token.",
    "trust_env": "Send requests through the proxy that the environment names.",
}
"""Of whichever type has them."""

ARGUMENTS = {
    "math": {
        "extract": "Where the answer stands: see above.",
        "boxes": "Which boxes count: the last, or all of them as a list.",
        "accept": "What counts as right where the reference is a plain number: see above.",
        "profile": "How strict the comparison is: see above.",
        "rounded": "A decimal reference stands for everything that rounds to it.",
        "cpu_limit_s": "Computing time for reading and comparing one answer, less than `timeout_s`; a response that takes longer is wrong.",
    },
    "exact": {
        "strip": "Ignore white space at both ends.",
        "ignore_case": "Ignore upper and lower case.",
        "collapse_spaces": "Every run of white space counts as one blank.",
        "ignore_punctuation": "Compare without punctuation and symbols, but for those of numbers and of mathematics.",
        "contains": "The answer may stand anywhere in the response.",
    },
    "code": {
        "mode": "tests: the response is a program. expression: it is a Python expression, worth the answer.",
        "column": "Column of the data that holds the tests, where the answer does not.",
        "languages": "Which the response may be written in; of several, the code block's label decides.",
        "extract": "Where the program stands: in a code block, in nothing but the response, or either; see above.",
        "prelude": "Python that stands before the program, such as `from typing import *`.",
        "score": "all: 1 where all tests pass. fraction: the share that passes.",
        "fail_fast": "Stop at the first test that fails; where absent, if score is all.",
        "compare": "Output is the same to the character, line by line, in its numbers, or (auto) line by line with decimals as numbers.",
        "tolerance": "Of numbers that are no integers: relative for values, relative or absolute for output.",
        "must_contain": "Texts that the program must hold.",
        "forbid": "Texts that it must not hold.",
        "test_s": "Computing time of one test.",
        "wall_s": "Its time by the clock; three times test_s where absent.",
        "total_s": "Computing time of all tests of a sample, and of compiling it.",
        "memory_mb": "Memory of a program.",
        "output_kb": "Most that it may print.",
        "file_mb": "Largest file that it may write.",
        "processes": "Most processes that it may have.",
        "parallel": "Programs that one worker runs at the same time.",
        "readable": "Folders that programs may read.",
        "python_path": "Folders that Python programs may import from.",
        "commands": "Further languages: how their programs are compiled and run.",
        "backend": "A sandbox elsewhere: {kind: roll_lite or sandbox_fusion, url, api_key_env, concurrency, timeout_s, retries}.",
        "allow_unprotected": "Run programs also where they cannot be isolated.",
    },
    "choice": {
        "extract": "Where the choice stands: see above.",
        "options": "Column of the data with the options' texts.",
        "letters": "How many options there are, where no column says so.",
    },
    "instruction": {
        "mode": "loose also accepts a response without its first or last line, or without its asterisks.",
        "score": "all: 1 where every instruction is followed. fraction: the share that is.",
        "ids": "Column with the list of instructions.",
        "arguments": "Column with the arguments of each.",
        "cpu_limit_s": "Computing time of one check; an instruction whose check takes longer counts as not followed.",
    },
    "length": {
        "target": "The right length.",
        "limit": "The longest right length.",
        "tolerance": "How far off the target is still right.",
        "width": "How far off is worth nothing.",
        "unit": "What is counted.",
    },
    "repetition": {
        "n": "Length of the pieces that are compared.",
        "unit": "What they are made of.",
        "free": "Share that costs nothing.",
    },
    "format": {
        "pattern": "Regular expression that has to match somewhere in the response.",
        "preset": "A form by name, in place of the pattern.",
    },
    "model": {
        "model": "Name of the model in the section `reward_models`.",
        "template": "The text that the model reads, or chat for its own chat template.",
        "question": "With `template: chat`, the user's message; where absent, the prompt as the data has it.",
        "scale": "The output as it is, or its sigmoid, between 0 and 1.",
        "threshold": "A response is correct where the unscaled output is above it.",
    },
    "judge": {
        "url": "The endpoint's base, such as https://host/v1, or several.",
        "server": "One of the judges that the run starts itself, in place of url and model.",
        "model": "The model's name at the endpoint.",
        "api": "Which of the endpoint's two interfaces to use.",
        "template": "What it is asked: {question} (as in the data), {prompt} (template applied), {response}, {answer}, {column} filled in.",
        "system": "A system message.",
        "pattern": "Regular expression that finds the verdict in what the judge says.",
        "choices": "Verdicts in words and what each is worth.",
        "scale": "Lowest and highest number that the judge may give, brought to 0 and 1.",
        "temperature": "The judge's sampling temperature; 0 is greedy, and cached.",
        "max_tokens": "Longest verdict.",
        "stop": "Texts that end a verdict.",
        "extra_body": "Further fields of the request.",
        "asks": "How often it is asked until a verdict can be read.",
        "cache_entries": "Verdicts kept in memory.",
        "cache_file": "File that keeps verdicts over runs.",
        "fingerprint": "Tells models of one name apart in the cache.",
    },
    "remote": {
        "batch_size": "Samples in one request.",
        "batch_wait_ms": "How long a sample waits for others to travel with.",
        "columns": "Columns of the data that are sent along; the prompt's own holds the question without the template.",
    },
}


NOTES = {
    "code": """The program is looked for after the thinking (`</think>`). Of several code blocks it is the last in one of `languages`, else
the last without a label; where the tests call functions, the last of them that defines these. So an example of its use, its output or
a command may follow it. A block that is not closed (cut, or ended by a stop text) goes on to the end.

The tests of a sample, in its answer or in `column`, as a list, a mapping or JSON text:

| form | a test is |
|---|---|
| `[{"stdin": "3 4", "stdout": "7"}, ...]`, `[{"input": ..., "output": ...}]` with `testtype: stdin` | a run of the program |
| `{"inputs": [...], "outputs": [...]}` (APPS, TACO) | a run for each; a call of the function with `fn_name` |
| `[{"args": [3, 4], "expected": 7}, ...]` with `fn_name` there or in a column of the data | a call |
| `["assert add(3, 4) == 7", ...]`, `{"test_list": [...], "test_setup_code": ...}` (MBPP) | asserts about the program |
| `from solution import add` and functions `test_...` (KodCode) | each of the functions |
| `{"test": "def check(candidate): ...", "entry_point": "add"}` (HumanEval), or columns of these names | its check function |

`fn_name` may also stand as `func_name` in the column `metadata` (LiveCodeBench). In the form of APPS, where all of a sample's expected
values stand in lists of their own (`[[5], [7]]`), the values alone (`5`, `7`) count as well. Values are compared as JSON has them: tuples,
ranges and iterators are lists. Integers have to be equal; other numbers may have a relative error of `tolerance`, and 1e-12 about zero.
Numbers in output (`compare: numeric`, and decimals with `auto`) may have an absolute or a relative error of `tolerance`.

**Asserts** run in a process of their own, which holds no line of the program; it calls the program's functions and gets plain data back.
So a program decides no comparison and cannot forge a verdict. What follows from that:

- The names that the tests use and neither define nor import are the program's. Modules (`math.pi`) are Python's own also without an
  import, and so are Python's built-in names, except for the `entry_point`, or where tests call nothing but one of these
  (`assert sum(10, 15) == 6`). Helpers that decide (`is_close(f(1), 2)`) belong into the tests: left to the program, they are forged.
- Plain data crosses as copies: numbers, text, bytes, lists, tuples, sets, dicts, ranges, arrays of numpy, and `Decimal`, `Fraction`,
  `date`, `time`, `datetime`, `timedelta`, `deque`, `Counter` and `OrderedDict`. What a function changes in its arguments is followed.
- Other objects stay with the program: the tests can call them, read and set attributes, index, loop, ask for `len`, truth, `next` and
  `isinstance` with the program's classes. They are compared as what they are (itself, or the list or number that they derive from).
- Exceptions of Python and of the program keep their types; one that would end a loop of the tests (`StopIteration`) becomes another.
- What the tests need and cannot be done that way is a failure with its cause, not a verdict: functions of the tests as arguments, comparing
  or adding objects of a class that the tests name and that has its own `__eq__` or `__add__`, awaiting coroutines, a module that is not
  there (`python_path`), tests that never use the program.
- What a program brings about by itself is wrong: a coroutine that the tests do not await, an object of its own where they name no class or
  helper of the program (`assert f(1) == 5`), a value of more than 8 MB.

**What programs find.** Python's own library, the system's programs and libraries, an empty folder of their own, and what `readable` and
`python_path` name: nothing else below /usr, no installed packages, nothing of the project. Behind mount namespaces they also have a
/dev/shm of their own, which multiprocessing needs; where landlock alone keeps them apart, they have none. Memory that processes share has
to be in a file. All of a program may use `memory_mb`; a process may have twice that as address space. `processes` counts threads, too.
It may print twice what is expected, where that is more than `output_kb`.

**What counts.** Where cgroup v2 lets a sandbox make a group (root, or an ordinary user whose group was delegated, as by
`systemd-run --user --scope`), the kernel counts computing time there, and memory and processes where it gives these to a group; the line
about the code sandbox in the log says which. Elsewhere the sandbox looks some twenty times a second; of processes that live more shortly
it estimates what they compute.

A sandbox elsewhere (`backend`) gets `POST {"job": ...}` and answers `{"outcome": ...}`, or `{"trouble": cause}` where it could not run the
job; `job_from_json` and `outcome_to_json` in `roll_lite/rewards/code_backends.py` read the one and write the other.

With `kind: sandbox_fusion` the URL is the `/run_code` of a
[SandboxFusion](https://github.com/bytedance/SandboxFusion) server: programs, calls, asserts and all languages mean the same there, as long
as its image has Python 3.10 or later and the languages' compilers. The program and its tests are processes of one sandbox there, so that
a program that is made to attack the tests is held off less well than here.""",
    "model": """A process of a reward model that dies is started again: with `hf` that one, on Megatron all of the model's. What it was
scoring fails with the cause and is tried again (`retries`); other copies go on, and where there is none, samples wait, without their
`timeout_s` running, until the model is back. The number of replaced processes is `reward/workers_replaced`.""",
}
"""Further paragraphs."""

EXAMPLES = {
    "math": r"""
reward:
  type: math
  args: {extract: boxed}
""",
    "exact": """
reward:
  type: exact
  args: {ignore_case: true, collapse_spaces: true}
""",
    "choice": """
reward:
  type: choice            # "The answer is (C)." against "C", or against that option's text
  args: {options: choices, letters: 4}
""",
    "instruction": """
reward:
  type: instruction       # rows as those of IFEval: instruction_id_list, kwargs
  args: {mode: loose, score: fraction}
""",
    "code": """
reward:
  type: code
  args: {languages: [python], score: fraction, test_s: 4, total_s: 12, memory_mb: 256}
  workers: 4
  timeout_s: 60
""",
    "judge": """
reward:
  type: judge
  args:
    url: https://judge.example/v1
    model: the-judge
    api_key_env: JUDGE_API_KEY      # the variable's name, never the key
  timeout_s: 60
""",
    "remote": """
reward:
  type: remote
  args:
    url: [http://node1:5000/get_reward, http://node2:5000/get_reward]
    batch_size: 16
  timeout_s: 60
""",
    "model": """
reward_models:
  helpful:
    path: models/reward-model
domains:
  chat:
    reward:
      type: model
      args: {model: helpful, scale: sigmoid}
""",
    "length": """
reward:
  type: math
  terms:
    - {type: length, args: {limit: 2000, width: 1000}, weight: 0.2}      # 0.2 up to 2,000 characters, nothing from 3,000 on
""",
    "repetition": """
reward:
  type: math
  terms:
    - {type: repetition, args: {n: 4, free: 0.1}, weight: -0.5}
""",
    "format": r"""
reward:
  type: math
  terms:
    - {type: format, args: {preset: think_answer}, weight: 0.2}
""",
}
