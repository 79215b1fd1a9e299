r"""Where answers stand: nested and unfinished tags and boxes."""

from __future__ import annotations

import pytest

from roll_lite.rewards.answer_extraction import after_thinking, all_boxed, last_tagged
from roll_lite.rewards.running.time_limit import limited


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{1} \boxed{\frac{2}{3}}", [r"\frac{2}{3}", "1"]),
        (r"\boxed{a \boxed{b}}", ["b"]),
        (r"\boxed{1} and \boxed{2", ["1"]),
        (r"\boxed{1} and \boxed{{2}", ["1"]),
        (r"} \boxed{\{1\}}", [r"\{1\}"]),
        (r"{ \boxed{1}", ["1"]),
        (r"\boxed{}", []),
        (r"fill \boxed{\phantom{00}} and \boxed{ ? } in: \boxed{7}", ["7"]),
        ("{1}", []),
    ],
)
def test_boxes(text: str, boxes: list[str]) -> None:
    assert all_boxed(text) == boxes


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("<answer>1</answer> <ANSWER>2</ANSWER>", "2"),
        ("I put it in <answer> tags: <answer>1</answer>", "1"),
        ("<answer>1</answer> as in </answer>", "1"),
        ("<answer>1</answer> <answer>2", "1"),
        ("</answer>1<answer>", None),
    ],
)
def test_tags(text: str, tagged: str | None) -> None:
    assert last_tagged(text) == tagged


def test_thinking() -> None:
    assert [after_thinking(text) for text in ("1", "1</think>2</thinking>3", "<think>1</think>2")] == ["1", "3", "2"]


def test_a_thought_that_was_not_closed_is_no_answer() -> None:
    assert [after_thinking(text) for text in ("<think>1", "<think>1</think>2<THINK>3", "a <thinking>1")] == ["", "", ""]
    assert after_thinking("1 but wait", prompt="Q\n<think>\n") == "" and after_thinking("1</think>2", prompt="Q<think>") == "2"
    assert after_thinking("1", prompt="<think>earlier</think> Q") == "1"


@pytest.mark.parametrize("piece", ["\\boxed{", "<answer>", "</think", "x", "{", "}"])
def test_unfinished_ones_take_no_time(piece: str) -> None:
    text = (piece * 400_000)[:350_000]
    limited(20.0, lambda: (after_thinking(text), last_tagged(text), all_boxed(text)))
