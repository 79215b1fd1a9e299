"""Command `roll-lite reward`: tries a domain's reward on reference answers or given responses before training."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from roll_lite.config.schema.domains import DomainConfig, RewardConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.prompts import PromptSet, Split, load_prompts
from roll_lite.data.row_values import RowError
from roll_lite.data.samples import FinishReason, Prompt, RewardInput
from roll_lite.data.sources import Row, read_rows
from roll_lite.data.templates import Template, load_tokenizer
from roll_lite.data.user_function import nearest_aside
from roll_lite.rewards.preview_table import Looked, References, render, render_references
from roll_lite.rewards.registry import REWARDS, typed_reward
from roll_lite.rewards.reward_type import RewardType, written
from roll_lite.rewards.running.reward_process import RewardProcess

RIGHT, WRONG_ANSWERS, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
INSTEAD = "--responses FILE (lines with `response` and `prompt` or `prompt_uid`), or --column NAME for a column of the data with right ones"
REFERENCES_S = 30.0
"""Time limit in seconds for checking the reference answers, unless `Look.limit` is None."""

Try = tuple[Prompt, str, str]
"""Prompt, response and finish reason."""


@dataclass(frozen=True)
class Look:
    domain: str | None
    split: Split = "train"
    limit: int | None = 20
    """Maximum responses; None: all."""
    responses: Path | None = None
    """JSON lines or a table, with `response` and `prompt_uid` or `prompt`, such as a run's samples."""
    column: str | None = None


def preview(config: RunConfig, look: Look) -> int:
    """Score responses, print a table and return the exit code."""
    looked: list[Looked] = []
    title = "responses" if look.responses else "reference answers" if look.column is None else f"responses of column {look.column}"
    references = None
    try:
        if look.responses is not None and look.column is not None:
            raise ValueError(f"--column: {look.column!r} would be ignored, --responses says where the responses are; give one of them")
        name = chosen_domain(config, look.domain)
        domain, path = config.domains[name], f"domains.{name}.reward"
        built_in = typed_reward(domain.reward.name, domain.reward.args, path) if domain.reward.name in REWARDS else None
        if built_in is not None and built_in.within_a_run:
            raise ValueError(f"{path}.name: {domain.reward.name!r} is scored by processes that only a run starts")
        prompts, tries = _tries(name, config, look, built_in)
        with closing(RewardProcess(domain.reward, path)) as reward:
            for prompt, response, reason in tries:
                score, seconds = reward.score(RewardInput.of(prompt, response, reason))
                looked.append(Looked(prompt, response, score, seconds))
                _progress(len(looked), len(tries))
        if built_in is not None and built_in.reads_answer_first:
            limit_s = None if look.limit is None else REFERENCES_S
            references = read_references(domain.reward, path, prompts, limit_s, lambda read: _progress(read, len(prompts)))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_USE
    except KeyboardInterrupt:
        if looked:
            render(looked, title)
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    render(looked, title)
    if references is not None:
        render_references(references, shows_all=look.limit is None)
    failed = any(isinstance(one.score, str) for one in looked)
    wrong = any(not isinstance(one.score, str) and not one.score.is_correct for one in looked)
    unreadable = references is not None and bool(references.unreadable)
    return WRONG_ANSWERS if failed or (look.responses is None and (wrong or unreadable)) else RIGHT


def chosen_domain(config: RunConfig, name: str | None) -> str:
    """Domain of this name; None: the only one."""
    names = list(config.domains)
    if name is None and len(names) > 1:
        raise ValueError(f"--domain: which one? There are {', '.join(names)}")
    name = name or names[0]
    if name not in names:
        raise ValueError(f"--domain: {name!r} is no domain{nearest_aside(name, names)}; there are {', '.join(names)}")
    return name


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done} of {total}" if done < total else "\r\033[K")
        sys.stderr.flush()


# ---------------------------------------------------------------- responses


def _tries(name: str, config: RunConfig, look: Look, reward: RewardType | None) -> tuple[PromptSet, list[Try]]:
    """Load prompts (the whole split if its references will be checked) and responses to score."""
    domain, tokenizer = config.domains[name], load_tokenizer(config.model.path)
    reads_all = reward is not None and reward.reads_answer_first
    if look.responses is not None:
        given = list(islice(_readable(look.responses, name), look.limit))
        if not given:
            raise ValueError(f"--responses: {look.responses} has no response of domain {name}")
        uids = [content.get("prompt_uid") for _, content in given]
        needed = None if reads_all or None in uids else 1 + max(uid for uid in uids if uid is not None)
        prompts = load_prompts(name, domain, look.split, tokenizer, config.domains, needed)
        template = Template(domain.template, domain.data.prompt, tokenizer, f"domains.{name}.template")
        by_text: dict[str, list[Prompt]] = {}
        for prompt in prompts if None in uids else ():
            by_text.setdefault(prompt.text, []).append(prompt)
        return prompts, [_given(row, content, prompts, by_text, _texts(content, domain, template)) for row, content in given]
    nothing = None
    if look.column is None and domain.data.answer is None:
        nothing = f"domains.{name}.data.answer: there are no reference answers"
    elif look.column is None and reward is not None and (what := reward.no_response()):
        nothing = f"domains.{name}.reward.name: nothing to score: the answers of {domain.reward.name!r} are {what}"
    prompts = load_prompts(name, domain, look.split, tokenizer, config.domains, 1 if nothing else None if reads_all else look.limit)
    if nothing:
        own = (domain.data.prompt, domain.data.answer)
        columns = [column for column, value in prompts[0].columns.items() if isinstance(value, str) and column not in own]
        there_are = f"; there are {', '.join(columns)}" if columns else ""
        raise ValueError(f"{nothing}; give {INSTEAD}{there_are}")
    return prompts, [(prompt, _response(prompt, reward, look), FinishReason.STOP) for prompt in islice(prompts, look.limit)]


def _response(prompt: Prompt, reward: RewardType | None, look: Look) -> str:
    if look.column is not None:
        if not isinstance(text := prompt.columns.get(look.column), str):
            raise ValueError(f"--column: prompt {prompt.uid} has no text in the column {look.column!r}; it has {', '.join(prompt.columns)}")
        return text
    response = written(prompt.answer) if reward is None else reward.response_for(prompt.answer)
    if response is None:
        problem = f"its answer {prompt.answer!r:.80} is no text that could be a response"
        raise ValueError(f"prompt {prompt.uid}: {problem}; give --responses FILE")
    return response


def _readable(file: Path, domain: str) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """Read this domain's lines of the file, without failed samples of a run. ValueError for an invalid line."""
    for row in read_rows(file.absolute()):
        content, place = row.content, f"--responses: {row.place}"
        if isinstance(content, str):
            raise ValueError(f"{place}: {content}")
        if content.get("domain", domain) != domain or ("failure" in content and content.get("finish_reason") is None):
            continue
        uid, reason = content.get("prompt_uid"), content.get("finish_reason")
        if not isinstance(content.get("response"), str):
            raise ValueError(f"{place}: column 'response': must be a text, got {content.get('response')!r:.80}")
        if uid is None and "prompt" not in content:
            raise ValueError(f"{place}: which prompt? It needs `prompt_uid` or `prompt`")
        if uid is not None and type(uid) is not int:
            raise ValueError(f"{place}: column 'prompt_uid': must be a whole number, got {uid!r:.80}")
        if reason is not None and reason not in tuple(FinishReason):
            raise ValueError(f"{place}: column 'finish_reason': must be one of {', '.join(FinishReason)}, got {reason!r:.80}")
        yield row, content


def _texts(content: Mapping[str, Any], domain: DomainConfig, template: Template) -> list[str]:
    """Possible texts of the prompt in a line of responses: as given, and with the template applied."""
    if "prompt" not in content:
        return []
    texts = [content["prompt"]] if isinstance(content["prompt"], str) else []
    try:
        return [*texts, template.render({domain.data.prompt: content["prompt"]})]
    except RowError:  # the template needs further columns
        return texts


def _given(row: Row, content: Mapping[str, Any], prompts: PromptSet, by_text: Mapping[str, list[Prompt]], texts: list[str]) -> Try:
    uid, place = content.get("prompt_uid"), f"--responses: {row.place}"
    if uid is None:
        found = [prompt for text in texts for prompt in by_text.get(text, [])]
        if not found or any(prompt.answer != found[0].answer for prompt in found):
            problem = "stands there with several answers; name one by `prompt_uid`" if found else "is not in the domain's data"
            raise ValueError(f"{place}: the prompt {content['prompt']!r:.80} {problem}")
        prompt = found[0]
    elif 0 <= uid < len(prompts):
        prompt = prompts[uid]
    else:
        raise ValueError(f"{place}: there is no prompt {uid}; the data has {len(prompts)}")
    if texts and prompt.text not in texts:
        message = f"prompt {prompt.uid} of the data is {prompt.text!r:.80}, not {content['prompt']!r:.80}"
        raise ValueError(f"{place}: {message}; is it of the other --split?")
    return prompt, content["response"], content.get("finish_reason") or FinishReason.STOP


# ---------------------------------------------------------------- references


def read_references(
    config: RewardConfig, path: str, prompts: PromptSet, seconds: float | None, progress: Callable[[int], None]
) -> References:
    """Find reference answers that the reward cannot read. Tries them in random order for at most `seconds` (None: no limit)."""
    plain = config.model_copy(update={"terms": [], "format": None})
    read: dict[int, str | None] = {}
    with closing(RewardProcess(plain, path)) as reward:
        until = math.inf if seconds is None else time.monotonic() + seconds
        for number in random.Random(0).sample(range(len(prompts)), len(prompts)):
            if time.monotonic() >= until:
                break
            score, _ = reward.score(RewardInput.of(prompts[number], "", FinishReason.STOP))
            read[prompts[number].uid] = score if isinstance(score, str) else None
            progress(len(read))
    return References(len(prompts), {uid: cause for uid, cause in sorted(read.items()) if cause is not None}, len(read))
