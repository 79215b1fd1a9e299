"""Prints the table and the summary of `roll-lite reward`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll_lite.data.samples import Prompt, Score

PLAIN_WIDTH = 140
LONGEST_CELL = 160
LONGEST_CAUSE = 300
REFERENCES_SHOWN = 10


@dataclass(frozen=True)
class Looked:
    prompt: Prompt
    response: str
    score: Score | str
    """Score, or the cause of failure."""
    seconds: float


@dataclass(frozen=True)
class References:
    total: int
    unreadable: dict[int, str]
    """Prompt uid -> why its reference answer is unreadable."""
    read: int
    """References read; less than all if the time ran out."""

    def summary(self) -> str:
        of_all = "" if self.read == self.total else f" looked at, spread over all {self.total} (--limit 0 looks at every one)"
        if not self.unreadable:
            return f"references: {'all ' if not of_all else ''}{self.read}{of_all}{',' if of_all else ''} can be read"
        share = len(self.unreadable) / max(self.read, 1)
        return f"references: {len(self.unreadable)} of {self.read}{of_all} cannot be read ({share:.2%})"


def render(looked: Sequence[Looked], title: str, stream: TextIO | None = None) -> None:
    console = _console(stream)
    console.print(_table(looked))
    for cause, prompts in _causes(looked).items():
        more = ", ..." if len(prompts) > 5 else ""
        listed = ", ".join(map(str, prompts[:5]))
        console.print(Text(f"failed {len(prompts)} x (prompt {listed}{more}): {cause}", style="red"), soft_wrap=True)
    console.print(Text(summary(looked, title)), soft_wrap=True)


def render_references(references: References, shows_all: bool, stream: TextIO | None = None) -> None:
    console = _console(stream)
    style = "red" if references.unreadable else "green"
    console.print(Text(references.summary(), style=style), soft_wrap=True)
    shown = list(references.unreadable.items())[: None if shows_all else REFERENCES_SHOWN]
    for uid, cause in shown:
        console.print(Text(f"  prompt {uid}: {cause[:LONGEST_CAUSE]}"), soft_wrap=True)
    if len(shown) < len(references.unreadable):
        console.print(Text(f"  and {len(references.unreadable) - len(shown)} more; --limit 0 lists them all"), soft_wrap=True)


def _console(stream: TextIO | None) -> Console:
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def summary(looked: Sequence[Looked], title: str) -> str:
    scores = [one.score for one in looked if not isinstance(one.score, str)]
    correct = sum(score.is_correct for score in scores)
    parts = [
        f"{len(looked)} {title}: {correct} correct ({correct / len(looked):.0%})",
        f"{len(scores) - correct} wrong",
        f"{len(looked) - len(scores)} failed",
    ]
    slowest = max(looked, key=lambda one: one.seconds)
    times = f"median {_time(median(one.seconds for one in looked))}, slowest {_time(slowest.seconds)} (prompt {slowest.prompt.uid})"
    value = f"; mean score {mean(score.value for score in scores):.4g}" if scores else ""
    return f"{', '.join(parts)}{value}; {times}"


def _table(looked: Sequence[Looked]) -> Table:
    shows_format = any(not isinstance(one.score, str) and one.score.format_ok is not None for one in looked)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt #", justify="right", no_wrap=True)
    for name, ratio in (("prompt", 4), ("response", 3), ("answer", 2), ("extracted", 2)):
        table.add_column(name, ratio=ratio, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("verdict", ratio=2, min_width=len("correct"), overflow="fold")
    for name in (*(["format"] if shows_format else []), "time"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    for one in looked:
        table.add_row(*_cells(one, shows_format))
    return table


def _cells(one: Looked, shows_format: bool) -> list[Text]:
    score = one.score
    value, extracted, has_format = "", "", ""
    if not isinstance(score, str):
        value, has_format = f"{score.value:.4g}", {None: "", True: "yes", False: "no"}[score.format_ok]
        others = ", ".join(f"{key}: {part}" for key, part in score.details.items() if key != "verdict")
        extracted = str(score.details.get("extracted", others))
    texts = [one.prompt.text, one.response, "" if one.prompt.answer is None else str(one.prompt.answer), extracted]
    return [
        Text(str(one.prompt.uid)),
        *(Text(_short(text)) for text in texts),
        Text(value),
        _verdict(score),
        *([Text(has_format)] if shows_format else []),
        Text(_time(one.seconds)),
    ]


def _verdict(score: Score | str) -> Text:
    """Verdict, with the reward's reason if the response is wrong."""
    if isinstance(score, str):
        return Text("FAILED", "bold red")
    if score.is_correct:
        return Text("correct", "green")
    why = score.details.get("verdict")
    return Text(f"wrong: {_short(why)}" if isinstance(why, str) and why else "wrong", "red")


def _short(text: str) -> str:
    """Shorten a long text to its beginning and end: a prompt's question may be at either."""
    text = text.strip().replace("\n", "⏎ ")
    half = (LONGEST_CELL - 5) // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]} ... {text[-half:]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _causes(looked: Sequence[Looked]) -> dict[str, list[int]]:
    counted = Counter(one.score for one in looked if isinstance(one.score, str))
    return {cause[:LONGEST_CAUSE]: [one.prompt.uid for one in looked if one.score == cause] for cause, _ in counted.most_common()}
