"""`roll-lite reward`: what it scores, shows and returns, on the shipped model's tokenizer and small data of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_lite.cli import main
from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.prompts import PromptSet
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.preview import read_references
from roll_lite.rewards.running.reward_process import RewardProcess

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = """
import os, time, subprocess
from roll_lite.data.samples import Score

def moody(sample):
    print("noise of the function")
    if sample.response == "hang":
        subprocess.Popen(["sleep", "300"])
        while True:
            time.sleep(0.01)
    if sample.response == "die":
        os._exit(3)
    if sample.response == "raise":
        raise KeyError("nothing there")
    return Score(0.5, sample.response == sample.answer, {"extracted": sample.response.upper()})

async def patient(sample):
    import asyncio
    await asyncio.sleep(100 if sample.response == "hang" else 0)
    return sample.response == sample.answer
"""
MATH = ("domains.sums.reward.name=math", "domains.sums.reward.timeout_s=30")
CODE = ("domains.sums.reward.name=code", "domains.sums.reward.timeout_s=60")
PROMPTS = [("1+1=", "2"), ("1+2=", "3"), ("2+2=", "4")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose domain `sums` the tests change by overrides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for split in ("train", "validation"):
        lines({"prompt": prompt, "answer": answer} for prompt, answer in PROMPTS).to(tmp_path / f"{split}.jsonl")
    (tmp_path / "preview_functions.py").write_text(FUNCTIONS)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(f"""
experiment: mine
model: {{path: {ROOT}/examples/models/tiny, dtype: float32}}
domains:
  sums:
    data: {{train: train.jsonl, validation: validation.jsonl}}
    sampling: {{max_prompt_tokens: 32, max_tokens: 16}}
    reward: {{name: exact, timeout_s: 1.0}}
""")
    return tmp_path


class lines(list[Any]):
    def to(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in self))
        return path


def look(*arguments: str) -> int:
    return main(["reward", "--config-name", "mine", "--config-path", "configs", *arguments])


def test_reference_answers_are_right(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert look("--domain", "sums", *MATH, "domains.sums.reward.args={extract: boxed}") == 0
    shown = capfd.readouterr().out
    assert r"\boxed{2}" in shown and "1+1=" in shown
    assert "3 reference answers: 3 correct (100%), 0 wrong, 0 failed; mean score 1" in shown


def test_wrong_references_are_an_error(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The answer of the second row is one that math-verify cannot read, the third is a list."""
    lines([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": ""}]).to(project / "train.jsonl")
    assert look(*MATH) == 1
    shown = capfd.readouterr().out
    assert "FAILED" in shown and "failed 1 x: reward math: the reference answer ''" in shown
    assert "2 reference answers: 1 correct (50%), 0 wrong, 1 failed" in shown


@pytest.mark.nightly
def test_references_that_cannot_be_read_are_counted_in_all_of_the_data(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the limit: the share is that of the prompts that will train."""
    answers = [str(i) for i in range(28)] + ["\\frac{", "", "7"]
    lines({"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(answers)).to(project / "train.jsonl")
    assert look("--limit", "2", *MATH) == 1, "a prompt that cannot be learnt is a mistake in the data"
    shown = capfd.readouterr().out
    assert "2 reference answers: 2 correct" in shown
    assert "references: 2 of 31 cannot be read (6.45%)\n  prompt 28: reward math: the reference answer '\\\\frac{'" in shown
    assert "\n  prompt 29: reward math: the reference answer ''" in shown
    lines({"prompt": f"p{i}", "answer": str(i)} for i in range(9)).to(project / "train.jsonl")
    assert look("--limit", "2", *MATH) == 0
    assert "references: all 9 can be read" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("reward", "row"),
    [
        ("choice", {"answer": "Z", "options": ["a", "b"]}),
        ("exact", {"answer": {"no": "text"}}),
        ("code", {"answer": "{not json"}),
        ("instruction", {"answer": "", "instruction_id_list": ["punctuation:no_such"], "kwargs": [{}]}),
    ],
)
def test_every_type_that_reads_references_says_which_it_cannot(
    project: Path, capfd: pytest.CaptureFixture[str], reward: str, row: dict[str, Any]
) -> None:
    lines([{"prompt": "p0", **row}]).to(project / "train.jsonl")
    file = lines([{"prompt_uid": 0, "response": "A"}]).to(project / "given.jsonl")
    look("--responses", str(file), f"domains.sums.reward.name={reward}", "domains.sums.reward.timeout_s=60")
    assert f"references: 1 of 1 cannot be read (100.00%)\n  prompt 0: reward {reward}: " in capfd.readouterr().out


def test_functions_of_users_are_not_called_for_references(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert look("domains.sums.reward.name=preview_functions.moody") == 0
    assert "references:" not in capfd.readouterr().out


@pytest.mark.nightly
def test_many_references_are_read_as_long_as_there_is_time() -> None:
    prompts = PromptSet("sums")
    for number in range(1200):
        prompts.add(f"p{number}", [1], "" if number % 10 == 0 else str(number))
    config = RewardConfig(name="math", timeout_s=60)
    everything = read_references(config, "domains.sums.reward", prompts, None)
    assert everything.read == everything.total == 1200
    assert list(everything.unreadable) == list(range(0, 1200, 10)) and "120 of 1200 cannot be read (10.00%)" in everything.summary()
    some = read_references(config, "domains.sums.reward", prompts, 0.0)
    assert some.read < 1200 and "looked at, spread over all 1200 (--limit 0 looks at every one)" in some.summary()


def test_why_a_response_is_wrong(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = lines([{"prompt_uid": 0, "response": "no number at all"}]).to(project / "given.jsonl")
    assert look("--responses", str(file), *MATH) == 0
    assert "wrong: no answer found" in capfd.readouterr().out


@pytest.mark.nightly
def test_the_limit_and_the_split(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines({"prompt": f"{i}+0=", "answer": str(i)} for i in range(30)).to(project / "validation.jsonl")
    for arguments, count in ((("--limit", "2"), 2), ((), 20), (("--limit", "0"), 30)):
        assert look("--split", "validation", *arguments) == 0
        assert f"{count} reference answers: {count} correct" in capfd.readouterr().out


def test_given_responses(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By number, by the prompt's text, and by its text before the template."""
    given = [{"prompt_uid": 1, "response": "3"}, {"prompt": "Q: 2+2= A:", "response": "5"}, {"prompt": "1+1=", "response": " 2 "}]
    file = lines(given).to(project / "given.jsonl")
    template = "domains.sums.template.text='Q: {prompt} A:'"
    assert look("--responses", str(file), template) == 0, "wrong responses are no error"
    shown = capfd.readouterr().out
    assert "3 responses: 2 correct (67%), 1 wrong, 0 failed" in shown
    assert [line.split()[0] for line in shown.splitlines() if "correct " in line or "wrong " in line][:3] == ["1", "2", "0"]


def test_the_samples_of_a_run(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sample = {"domain": "sums", "prompt_uid": 0, "prompt": "1+1=", "response": "2", "finish_reason": "stop", "failure": None}
    dump = [
        sample,
        {**sample, "domain": "other", "prompt_uid": 7},
        {**sample, "response": "", "finish_reason": None, "failure": "the engine died"},
        {**sample, "response": "3", "failure": "reward: time-out"},
    ]
    file = lines(dump).to(project / "step_000001.jsonl")
    assert look("--responses", str(file)) == 0
    assert "2 responses: 1 correct (50%), 1 wrong, 0 failed" in capfd.readouterr().out
    lines([{**sample, "prompt": "9+9="}]).to(file)
    assert look("--responses", str(file)) == 2
    assert "prompt 0 of the data is '1+1=', not '9+9='; is it of the other --split?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ({"prompt_uid": 3, "response": "1"}, "there is no prompt 3; the data has 3"),
        ({"prompt": "7+7=", "response": "1"}, "the prompt '7+7=' is not in the domain's data"),
        ({"response": "1"}, "which prompt? It needs `prompt_uid` or `prompt`"),
        ({"prompt_uid": 1.5, "response": "1"}, "column 'prompt_uid': Input should be a valid integer, got 1.5"),
        ({"prompt_uid": [0], "response": "1"}, "column 'prompt_uid': Input should be a valid integer, got [0]"),
        (
            {"prompt_uid": 0, "response": "1", "finish_reason": "tired"},
            "'finish_reason': Input should be 'stop', 'length', 'abort' or 'max_turns', got 'tired'",
        ),
        ({"prompt_uid": 0, "response": "1", "finish_reason": {}}, "column 'finish_reason': Input should be"),
        ({"prompt_uid": 0, "response": 1}, "column 'response': Input should be a valid string, got 1"),
        ({"domain": "other", "prompt_uid": 0, "response": "1"}, "has no response of domain sums"),
    ],
)
def test_responses_that_fit_no_prompt(project: Path, capfd: pytest.CaptureFixture[str], line: dict[str, Any], fragment: str) -> None:
    assert look("--responses", str(lines([line]).to(project / "given.jsonl"))) == 2
    assert fragment in capfd.readouterr().err


def test_responses_from_a_column(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines([{"prompt": "1+1=", "answer": "2", "solution": "2"}]).to(project / "train.jsonl")
    assert look("--column", "solution") == 0
    assert "1 responses of column solution: 1 correct" in capfd.readouterr().out
    assert look("--column", "solutoin") == 2
    assert "no text in the column 'solutoin'; it has prompt, answer, solution" in capfd.readouterr().err


def test_expressions(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers = ["2", 2, [1, "a"], "word"]
    lines({"prompt": f"p{number}", "answer": answer, "solution": "1 + 1"} for number, answer in enumerate(answers)).to(
        project / "train.jsonl"
    )
    assert look(*CODE, "domains.sums.reward.args={mode: expression}") == 0
    assert "4 reference answers: 4 correct" in capfd.readouterr().out
    lines([{"prompt": "1+1=", "answer": "2", "solution": "1 + 1"}]).to(project / "train.jsonl")
    assert look(*CODE, "domains.sums.reward.args={mode: expression, must_contain: ['+']}", "--column", "solution") == 0
    assert "1 responses of column solution: 1 correct" in capfd.readouterr().out


def test_responses_come_from_one_place(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = lines([{"prompt": "1+1=", "response": "2"}])
    given.to(project / "given.jsonl")
    with pytest.raises(SystemExit, match="2"):
        look("--responses", str(project / "given.jsonl"), "--column", "answer")
    assert "argument --column: not allowed with argument --responses" in capfd.readouterr().err


def test_domains_without_reference_responses(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert look("domains.sums.data.answer=null", "domains.sums.reward={name: format, args: {preset: boxed}}") == 2
    assert "prompt 0: its answer None is no response that could be right; give --responses FILE" in capfd.readouterr().err
    assert look("domains.sums.reward={name: format, args: {preset: boxed}}") == 2
    assert "prompt 0: its answer '2' is no response that could be right" in capfd.readouterr().err
    lines([{"prompt": "1+1=", "answer": "2", "solution": "1 + 1", "source": "me"}]).to(project / "train.jsonl")
    assert look(*CODE, "domains.sums.reward.args={mode: expression, must_contain: ['sum']}") == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert told.endswith("or --column NAME for a column of the data with right ones; there are solution, source\n")
    assert look("--domain", "sum") == 2
    assert "'sum' is no domain, did you mean 'sums'?" in capfd.readouterr().err


def test_hangs_crashes_and_mistakes_are_shown_with_their_causes(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = lines({"prompt_uid": 0, "response": text} for text in ("hang", "2", "die", "raise", "3")).to(project / "given.jsonl")
    assert look("--responses", str(file), "domains.sums.reward.name=preview_functions.moody") == 1
    shown, noise = capfd.readouterr()
    assert "5 responses: 1 correct (20%), 1 wrong, 3 failed; mean score 0.5" in shown
    for cause in ("time-out: no score within 1 s", "its process died (exit code 3)", "KeyError: 'nothing there'"):
        assert cause in shown
    assert "noise of the function" not in shown and "noise of the function" in noise
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "300"] and one.ppid() in (1, os.getpid())
    ]


def test_async_functions_and_forms(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = lines({"prompt_uid": 0, "response": text} for text in ("hang", "2")).to(project / "given.jsonl")
    arguments = ["domains.sums.reward.name=preview_functions.patient", "domains.sums.reward.format={pattern: '^[0-9]$'}"]
    assert look("--responses", str(file), *arguments) == 1
    shown = capfd.readouterr().out
    assert "time-out: no score within 1 s" in shown and "format" in shown and "yes" in shown


def test_mistakes_in_the_reward_are_told(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert look("domains.sums.reward.args={strip: [1]}") == 2
    assert "domains.sums.reward.args.strip = [1]: expected true or false" in capfd.readouterr().err


def test_one_process_serves_many_samples() -> None:
    item = RewardInput("sums", "1+1=", "2", "2", {}, "stop")
    with closing(RewardProcess(RewardConfig(name="exact"), "domains.sums.reward")) as reward:
        first = reward._process.pid
        assert first is not None
        scores = [reward.score(item)[0] for _ in range(3)]
        assert all(isinstance(score, Score) and score.is_correct for score in scores)
        assert reward._process.pid == first
    assert not psutil.pid_exists(first)


@pytest.mark.nightly
@pytest.mark.parametrize("ending", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL])
@pytest.mark.usefixtures("signals_arrive")
def test_interrupting_leaves_no_process(project: Path, ending: signal.Signals) -> None:
    file = lines({"prompt_uid": 0, "response": text} for text in ("2", "hang")).to(project / "given.jsonl")
    changes = ["domains.sums.reward.name=preview_functions.moody", "domains.sums.reward.timeout_s=200"]
    arguments = ["reward", "--config-name", "mine", "--config-path", "configs", "--responses", str(file), *changes]
    command = [sys.executable, "-m", "roll_lite.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as run:
        started = psutil.Process(run.pid)
        deadline = time.monotonic() + 60
        while not (hanging := [one for one in started.children(recursive=True) if one.name() == "sleep"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        everyone = started.children(recursive=True)
        os.killpg(run.pid, ending) if ending == signal.SIGINT else run.kill()
        out, err = run.communicate(timeout=20)
    if ending == signal.SIGINT:
        assert run.returncode == 130 and "interrupted" in err and "Traceback" not in err
        assert "1 responses: 1 correct" in out, "what was scored until then is shown"
    assert hanging and psutil.wait_procs(everyone, timeout=10)[1] == []


def test_the_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "reward" in capsys.readouterr().out
