"""What a validation measures, from rows by hand."""

from __future__ import annotations

import io
import json
from math import nan, sqrt
from pathlib import Path

import pytest
import torch

from roll_lite.algorithms.at_k import NO_ANSWER, READS_NONE
from roll_lite.data.proto import DataProto, object_column
from roll_lite.observability.console import RunConsole
from roll_lite.observability.report import write_evaluation
from roll_lite.pipeline.journal import held_out_metrics

Prompt = tuple[str, str, list[int], list[int]]
"""Domain, parts, whether each sample is correct, and its answer."""


def rows_of(*prompts: Prompt) -> DataProto:
    correct = [float(one) for *_, verdicts, _ in prompts for one in verdicts]
    return DataProto(
        {
            "sample": torch.arange(len(correct)),
            "group": torch.tensor([number for number, (*_, verdicts, _) in enumerate(prompts) for _ in verdicts]),
            "domain": object_column([domain for domain, _, verdicts, _ in prompts for _ in verdicts]),
            "parts": object_column([tuple(parts.split()) for _, parts, verdicts, _ in prompts for _ in verdicts]),
            "finish_reason": object_column([("length", "stop", "max_turns")[number % 3] for number in range(len(correct))]),
            "correct": torch.tensor(correct),
            "score": torch.tensor(correct) * 2,
            "response_length": torch.arange(len(correct)),
            "answer": torch.tensor([answer for *_, answers in prompts for answer in answers]),
        }
    )


def test_by_domain_by_part_and_over_all_by_hand() -> None:
    """One of two right: one choice of two has it, and the vote is tied. A prompt with one sample left has no pairs."""
    rows = rows_of(
        ("maths", "level:1", [1, 1], [0, 0]),
        ("maths", "level:2", [1, 0], [0, 1]),
        ("maths", "level:2", [0, 0], [0, NO_ANSWER]),
        ("maths", "level:3", [1], [0]),
        ("code", "", [0, 1], [READS_NONE, READS_NONE]),
    )
    assert held_out_metrics(rows, 2).values() == pytest.approx(
        {
            "validation/accuracy": 5 / 9,
            "validation/accuracy_error": sqrt(5 / 4 * 182 / 81) / 9,
            "validation/prompts": 5,
            "validation/samples": 9,
            "validation/truncated": 3 / 9,
            "validation/max_turns": 3 / 9,
            "validation/reward": 10 / 9,
            "validation/response_tokens": 4.0,
            "validation/pass@2": 3 / 4,
            "validation/best@2": 6 / 4,
            "validation/maj@2": 1.5 / 3,
            "domain/maths/validation/accuracy": 4 / 7,
            "domain/maths/validation/accuracy_error": sqrt(4 / 3 * 110 / 49) / 7,
            "domain/maths/validation/prompts": 4,
            "domain/maths/validation/samples": 7,
            "domain/maths/validation/truncated": 3 / 7,
            "domain/maths/validation/max_turns": 2 / 7,
            "domain/maths/validation/reward": 8 / 7,
            "domain/maths/validation/response_tokens": 3.0,
            "domain/maths/validation/pass@2": 2 / 3,
            "domain/maths/validation/best@2": 4 / 3,
            "domain/maths/validation/maj@2": 1.5 / 3,
            "domain/maths/level:1/validation/accuracy": 1.0,
            "domain/maths/level:1/validation/accuracy_error": nan,
            "domain/maths/level:1/validation/prompts": 1,
            "domain/maths/level:1/validation/samples": 2,
            "domain/maths/level:1/validation/truncated": 0.5,
            "domain/maths/level:1/validation/max_turns": 0.0,
            "domain/maths/level:1/validation/reward": 2.0,
            "domain/maths/level:1/validation/response_tokens": 0.5,
            "domain/maths/level:1/validation/pass@2": 1.0,
            "domain/maths/level:1/validation/best@2": 2.0,
            "domain/maths/level:1/validation/maj@2": 1.0,
            "domain/maths/level:2/validation/accuracy": 1 / 4,
            "domain/maths/level:2/validation/accuracy_error": 0.25,
            "domain/maths/level:2/validation/prompts": 2,
            "domain/maths/level:2/validation/samples": 4,
            "domain/maths/level:2/validation/truncated": 0.25,
            "domain/maths/level:2/validation/max_turns": 2 / 4,
            "domain/maths/level:2/validation/reward": 2 / 4,
            "domain/maths/level:2/validation/response_tokens": 3.5,
            "domain/maths/level:2/validation/pass@2": 1 / 2,
            "domain/maths/level:2/validation/best@2": 1.0,
            "domain/maths/level:2/validation/maj@2": 0.25,
            "domain/maths/level:3/validation/accuracy": 1.0,
            "domain/maths/level:3/validation/accuracy_error": nan,
            "domain/maths/level:3/validation/prompts": 1,
            "domain/maths/level:3/validation/samples": 1,
            "domain/maths/level:3/validation/truncated": 1.0,
            "domain/maths/level:3/validation/max_turns": 0.0,
            "domain/maths/level:3/validation/reward": 2.0,
            "domain/maths/level:3/validation/response_tokens": 6.0,
            "domain/code/validation/accuracy": 0.5,
            "domain/code/validation/accuracy_error": nan,
            "domain/code/validation/prompts": 1,
            "domain/code/validation/samples": 2,
            "domain/code/validation/truncated": 0.0,
            "domain/code/validation/max_turns": 1 / 2,
            "domain/code/validation/reward": 1.0,
            "domain/code/validation/response_tokens": 7.5,
            "domain/code/validation/pass@2": 1.0,
            "domain/code/validation/best@2": 2.0,
        },
        nan_ok=True,
    )


def test_a_prompt_counts_in_each_of_its_parts() -> None:
    got = held_out_metrics(rows_of(("maths", "level:1 subject:sums", [1], [0]), ("maths", "level:2 subject:sums", [0], [0])), 1).values()
    parts = {name.split("/")[2]: value for name, value in got.items() if name.endswith("/validation/accuracy") and name.count("/") == 4}
    assert parts == {"level:1": 1.0, "level:2": 0.0, "subject:sums": 0.5}
    assert got["domain/maths/subject:sums/validation/accuracy_error"] == 0.5, "of two prompts, one of them solved"


def test_one_sample_is_worth_its_mean() -> None:
    names = held_out_metrics(rows_of(("maths", "", [1], [0]), ("maths", "", [0], [0])), 1).values()
    assert names == {f"{prefix}validation/{name}": names[f"validation/{name}"] for prefix in ("", "domain/maths/") for name in MEASURES}


def test_the_table_of_an_evaluation_by_hand(tmp_path: Path) -> None:
    """Four samples of each prompt. A right answer scores 2; a third of all responses is cut; the n-th response has n - 1 tokens.

    maths: 3, 2, 1 and 0 of 4 are right. The votes: the right answer against one; two against two, a tie; nobody; a wrong one. So maj@4 is
    the mean of 1, 0.5, 0 and 0. The prompts' means deviate by 0.323 from theirs; half of it is the standard error of four.
    """
    rows = rows_of(
        ("maths", "level:10 subject:sums", [1, 1, 1, 0], [0, 0, 0, 1]),
        ("maths", "level:2 subject:sums", [0, 0, 1, 1], [0, 0, 1, 1]),
        ("maths", "level:2 subject:roots", [0, 0, 0, 1], [NO_ANSWER, NO_ANSWER, NO_ANSWER, NO_ANSWER]),
        ("maths", "level:2 subject:roots", [0, 0, 0, 0], [0, 0, 0, 1]),
        ("code", "", [1, 1, 0, 0], [READS_NONE] * 4),
    )
    (tmp_path / "config.yaml").write_text("mode: evaluate\n")
    results = write_evaluation(tmp_path, Path("model"), held_out_metrics(rows, 4).values() | {"validation/tokens_per_second": 1234.0})
    stream = io.StringIO()
    RunConsole(["maths", "code"], 1, stream).evaluation(results)
    header, _, *table = (line.split() for line in stream.getvalue().splitlines() if line)
    assert header == ["held-out", "accuracy", "±", "pass@4", "maj@4", "reward", "best@4", "truncated", "tokens", "prompts", "samples"]
    assert table[:-1] == [line.split() for line in TABLE.strip().splitlines()]
    assert " ".join(table[-1]) == "± one standard error, by prompt; 1.2k tokens/s"
    assert json.loads((tmp_path / "evaluation.json").read_text())["results"]["maths/level:2"]["best@4"] == pytest.approx(4 / 3)


TABLE = """
maths           37.5%  16.1%   75.0%   37.5%  0.75  1.50  37.5%   8  4  16
level:2         25.0%  14.4%   66.7%   16.7%  0.50  1.33  33.3%  10  3  12
level:10        75.0%      -  100.0%  100.0%  1.50  2.00  50.0%   2  1   4
subject:roots   12.5%  12.5%   50.0%    0.0%  0.25  1.00  37.5%  12  2   8
subject:sums    62.5%  12.5%  100.0%   75.0%  1.25  2.00  37.5%   4  2   8
code            50.0%      -  100.0%       -  1.00  2.00  25.0%  18  1   4
overall         40.0%  12.7%   80.0%   37.5%  0.80  1.60  35.0%  10  5  20
"""


MEASURES = ("accuracy", "accuracy_error", "max_turns", "prompts", "reward", "response_tokens", "samples", "truncated")
