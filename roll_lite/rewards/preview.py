"""Command `roll-lite reward`: try a domain's reward on reference answers or given responses."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.user_function import nearest_aside
from roll_lite.data.prompts import PromptSet, Split, load_prompts
from roll_lite.data.samples import FinishReason, Prompt, RewardInput, Score
from roll_lite.data.sources import read_rows
from roll_lite.data.templates import load_tokenizer
from roll_lite.rewards.base import RewardType
from roll_lite.rewards.registry import REWARDS, typed_reward
from roll_lite.rewards.running.reward_process import RewardProcess

RIGHT, WRONG_ANSWERS, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
INSTEAD = "--responses FILE (lines with `response` and `prompt` or `prompt_uid`), or --column NAME for a column of the data with right ones"
REFERENCES_S = 30.0

PLAIN_WIDTH = 140
LONGEST_CELL = 160
LONGEST_CAUSE = 300
REFERENCES_SHOWN = 10
COLUMNS = {"prompt #": 0, "prompt": 4, "response": 3, "answer": 2, "extracted": 2, "score": 0, "verdict": 2, "format": 0, "time": 0}

Try = tuple[Prompt, str, FinishReason]
Item = TypeVar("Item")


class Given(BaseModel):
    response: str
    prompt: Any = None
    prompt_uid: Annotated[int, Field(strict=True)] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Looked:
    prompt: Prompt
    response: str
    score: Score | str
    seconds: float


@dataclass(frozen=True)
class References:
    total: int
    unreadable: dict[int, str]
    read: int
    """Reference answers tried; fewer than `total` if time ran out."""

    def summary(self) -> str:
        of_all = "" if self.read == self.total else f" looked at, spread over all {self.total} (--limit 0 looks at every one)"
        if not self.unreadable:
            return f"references: {'all ' if not of_all else ''}{self.read}{of_all}{',' if of_all else ''} can be read"
        share = len(self.unreadable) / max(self.read, 1)
        return f"references: {len(self.unreadable)} of {self.read}{of_all} cannot be read ({share:.2%})"


def preview(config: RunConfig, name: str | None, split: Split, limit: int | None, responses: Path | None, column: str | None) -> int:
    looked: list[Looked] = []
    title = "responses" if responses else "reference answers" if column is None else f"responses of column {column}"
    references = None
    try:
        name = chosen_domain(config, name)
        domain, path = config.domains[name], f"domains.{name}.reward"
        built_in = typed_reward(domain.reward.name, domain.reward.args, path) if domain.reward.name in REWARDS else RewardType()
        if built_in.within_a_run:
            raise ValueError(f"{path}.name: {domain.reward.name!r} is scored by processes that only a run starts")
        reads_all = responses is not None or built_in.reads_answer_first
        prompts = load_prompts(name, domain, split, load_tokenizer(config.model.path), config.domains, None if reads_all else limit)
        if responses is not None:
            tries = _given(responses, name, prompts, limit)
        else:
            tries = [(prompt, _response(prompt, built_in, column), FinishReason.STOP) for prompt in islice(prompts, limit)]
        with closing(RewardProcess(domain.reward, path)) as reward:
            for prompt, response, reason in _tracked(tries):
                looked.append(Looked(prompt, response, *reward.score(RewardInput.of(prompt, response, reason))))
        if built_in.reads_answer_first:
            references = read_references(domain.reward, path, prompts, None if limit is None else REFERENCES_S)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_USE
    except KeyboardInterrupt:
        if looked:
            render(looked, title)
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    render(looked, title)
    failed = any(isinstance(one.score, str) for one in looked)
    wrong = any(not isinstance(one.score, str) and not one.score.is_correct for one in looked)
    if references is not None:
        render_references(references, shows_all=limit is None)
        wrong = wrong or bool(references.unreadable)
    return WRONG_ANSWERS if failed or (responses is None and wrong) else RIGHT


def chosen_domain(config: RunConfig, name: str | None) -> str:
    names = list(config.domains)
    if name is None and len(names) > 1:
        raise ValueError(f"--domain: which one? There are {', '.join(names)}")
    name = name or names[0]
    if name not in names:
        raise ValueError(f"--domain: {name!r} is no domain{nearest_aside(name, names)}; there are {', '.join(names)}")
    return name


def _tracked(items: Sequence[Item]) -> Iterable[Item]:
    return track(items, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


# ---------------------------------------------------------------- responses


def _response(prompt: Prompt, reward: RewardType, column: str | None) -> str:
    if column is not None:
        if not isinstance(text := prompt.columns.get(column), str):
            raise ValueError(f"--column: prompt {prompt.uid} has no text in the column {column!r}; it has {', '.join(prompt.columns)}")
        return text
    response = reward.response_for(prompt.answer)
    if response is None:
        texts = [
            column for column, value in prompt.columns.items() if isinstance(value, str) and value not in (prompt.question, prompt.answer)
        ]
        there_are = f"; there are {', '.join(texts)}" if texts else ""
        problem = f"prompt {prompt.uid}: its answer {prompt.answer!r:.80} is no response that could be right"
        raise ValueError(f"{problem}; give {INSTEAD}{there_are}")
    return response


def _given(file: Path, domain: str, prompts: PromptSet, limit: int | None) -> list[Try]:
    by_text: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        for text in {repr(prompt.text), repr(prompt.question)}:
            by_text.setdefault(text, []).append(prompt)
    tries = [_chosen(place, one, prompts, by_text) for place, one in islice(_readable(file, domain), limit)]
    if not tries:
        raise ValueError(f"--responses: {file} has no response of domain {domain}")
    return tries


def _readable(file: Path, domain: str) -> Iterator[tuple[str, Given]]:
    for row in read_rows(file.absolute()):
        content, place = row.content, f"--responses: {row.place}"
        if isinstance(content, str):
            raise ValueError(f"{place}: {content}")
        if content.get("domain", domain) != domain or ("failure" in content and content.get("finish_reason") is None):
            continue
        try:
            given = Given.model_validate(content)
        except ValidationError as problems:
            first = problems.errors()[0]
            raise ValueError(f"{place}: column {first['loc'][0]!r}: {first['msg']}, got {first['input']!r:.80}") from None
        if given.prompt_uid is None and given.prompt is None:
            raise ValueError(f"{place}: which prompt? It needs `prompt_uid` or `prompt`")
        yield place, given


def _chosen(place: str, given: Given, prompts: PromptSet, by_text: Mapping[str, list[Prompt]]) -> Try:
    uid, text = given.prompt_uid, given.prompt
    if uid is None:
        found = by_text.get(repr(text), [])
        if not found or any(prompt.answer != found[0].answer for prompt in found):
            problem = "stands there with several answers; name one by `prompt_uid`" if found else "is not in the domain's data"
            raise ValueError(f"{place}: the prompt {text!r:.80} {problem}")
        prompt = found[0]
    elif 0 <= uid < len(prompts):
        prompt = prompts[uid]
    else:
        raise ValueError(f"{place}: there is no prompt {uid}; the data has {len(prompts)}")
    if text not in (None, prompt.text, prompt.question):
        raise ValueError(f"{place}: prompt {prompt.uid} of the data is {prompt.text!r:.80}, not {text!r:.80}; is it of the other --split?")
    return prompt, given.response, given.finish_reason or FinishReason.STOP


# ---------------------------------------------------------------- references


def read_references(config: RewardConfig, path: str, prompts: PromptSet, seconds: float | None) -> References:
    """Let the reward read the reference answers, in random order and for at most `seconds`."""
    plain = config.model_copy(update={"terms": [], "format": None})
    read: dict[int, str | None] = {}
    with closing(RewardProcess(plain, path)) as reward:
        until = math.inf if seconds is None else time.monotonic() + seconds
        for number in _tracked(random.Random(0).sample(range(len(prompts)), len(prompts))):
            if time.monotonic() >= until:
                break
            score, _ = reward.score(RewardInput.of(prompts[number], "", FinishReason.STOP))
            read[prompts[number].uid] = score if isinstance(score, str) else None
    return References(len(prompts), {uid: cause for uid, cause in sorted(read.items()) if cause is not None}, len(read))


# ---------------------------------------------------------------- table


def render(looked: Sequence[Looked], title: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, share in COLUMNS.items():
        table.add_column(name, ratio=share or None, no_wrap=not share, overflow="fold", min_width=len(name))
    for one in looked:
        score, prompt, seconds = one.score, one.prompt, one.seconds
        value, extracted, has_format = "", "", ""
        if not isinstance(score, str):
            value, has_format = f"{score.value:.4g}", {None: "", True: "yes", False: "no"}[score.format_ok]
            others = ", ".join(f"{key}: {part}" for key, part in score.details.items() if key != "verdict")
            extracted = str(score.details.get("extracted", others))
        answer = "" if prompt.answer is None else str(prompt.answer)
        texts = [str(prompt.uid), *map(_short, (prompt.text, one.response, answer, extracted)), value]
        time_taken = f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
        table.add_row(*map(Text, texts), _verdict(score), Text(has_format), Text(time_taken))
    _print(table)
    for cause, count in Counter(one.score for one in looked if isinstance(one.score, str)).most_common():
        _print(Text(f"failed {count} x: {cause[:LONGEST_CAUSE]}", style="red"))
    _print(Text(summary(looked, title)))


def render_references(references: References, shows_all: bool) -> None:
    _print(Text(references.summary(), style="red" if references.unreadable else "green"))
    shown = list(references.unreadable.items())[: None if shows_all else REFERENCES_SHOWN]
    for uid, cause in shown:
        _print(Text(f"  prompt {uid}: {cause[:LONGEST_CAUSE]}"))
    if len(shown) < len(references.unreadable):
        _print(Text(f"  and {len(references.unreadable) - len(shown)} more; --limit 0 lists them all"))


def _print(shown: Table | Text) -> None:
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(shown, soft_wrap=isinstance(shown, Text))


def summary(looked: Sequence[Looked], title: str) -> str:
    scores = [one.score for one in looked if not isinstance(one.score, str)]
    correct = sum(score.is_correct for score in scores)
    correct_of_all = f"{len(looked)} {title}: {correct} correct ({correct / len(looked):.0%})"
    parts = [correct_of_all, f"{len(scores) - correct} wrong", f"{len(looked) - len(scores)} failed"]
    return ", ".join(parts) + (f"; mean score {mean(score.value for score in scores):.4g}" if scores else "")


def _verdict(score: Score | str) -> Text:
    if isinstance(score, str):
        return Text("FAILED", "bold red")
    if score.is_correct:
        return Text("correct", "green")
    why = score.details.get("verdict")
    return Text(f"wrong: {_short(why)}" if isinstance(why, str) and why else "wrong", "red")


def _short(text: str) -> str:
    text = text.strip().replace("\n", "⏎ ")
    half = (LONGEST_CELL - 5) // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]} ... {text[-half:]}"
