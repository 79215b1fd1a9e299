"""`roll-lite reward`: tries a domain's reward on reference answers or given responses before training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.prompts import PromptSet, Split, load_prompts
from roll_lite.data.row_values import RowError
from roll_lite.data.samples import FinishReason, Prompt, RewardInput
from roll_lite.data.sources import Row, read_rows
from roll_lite.data.templates import Template, Tokenizer, load_tokenizer
from roll_lite.data.user_function import nearest_aside
from roll_lite.rewards.preview_table import Looked, render, render_references
from roll_lite.rewards.references import written
from roll_lite.rewards.registry import REWARDS, typed_reward
from roll_lite.rewards.reward_type import RewardType
from roll_lite.rewards.running.reward_process import RewardProcess
from roll_lite.rewards.unreadable import References, read_references

RIGHT, WRONG_ANSWERS, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""
INSTEAD = "--responses FILE (lines with `response` and `prompt` or `prompt_uid`), or --column NAME for a column of the data with right ones"
REFERENCES_S = 30.0
"""Time limit for reading the split's references if `limit` is set."""


@dataclass(frozen=True)
class Look:
    """Selection of the responses to score."""

    domain: str | None
    """Name of the domain; optional if there is only one."""
    split: Split = "train"
    limit: int | None = 20
    """Maximum number of responses; None: all."""
    responses: Path | None = None
    """File of lines with `response` and `prompt_uid` or `prompt`, such as the samples of a run."""
    column: str | None = None
    """Column of the data to take the responses from."""


@dataclass(frozen=True)
class _Try:
    prompt: Prompt
    response: str
    finish_reason: str = FinishReason.STOP


def preview(config: RunConfig, look: Look) -> int:
    """Score responses and print a table; wrong use is reported on standard error. Returns the exit code."""
    looked: list[Looked] = []
    try:
        if look.responses is not None and look.column is not None:
            raise ValueError(f"--column: {look.column!r} would be ignored, --responses says where the responses are; give one of them")
        name = _domain(config, look)
        domain = config.domains[name]
        prompts, tries = _tries(name, domain, config, look)
        with RewardProcess(domain.reward, f"domains.{name}.reward") as reward:
            for one in tries:
                score, seconds = reward.score(_sample(one))
                looked.append(Looked(one.prompt, one.response, score, seconds))
                _progress(len(looked), len(tries))
        references = _references(name, domain, prompts, look)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_USE
    except KeyboardInterrupt:
        if looked:
            render(looked, _title(look))
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    render(looked, _title(look))
    if references is not None:
        render_references(references, shows_all=look.limit is None)
    failed = any(isinstance(one.score, str) for one in looked)
    wrong = any(not isinstance(one.score, str) and not one.score.is_correct for one in looked)
    unreadable = references is not None and bool(references.unreadable)
    return WRONG_ANSWERS if failed or (look.responses is None and (wrong or unreadable)) else RIGHT


def _title(look: Look) -> str:
    return "responses" if look.responses else "reference answers" if look.column is None else f"responses of column {look.column}"


def _domain(config: RunConfig, look: Look) -> str:
    names = list(config.domains)
    if look.domain is None and len(names) > 1:
        raise ValueError(f"--domain: which one? There are {', '.join(names)}")
    name = look.domain or names[0]
    if name not in names:
        raise ValueError(f"--domain: {name!r} is no domain{nearest_aside(name, names)}; there are {', '.join(names)}")
    reward = _typed(name, config.domains[name])
    if reward is not None and reward.within_a_run:
        raise ValueError(f"domains.{name}.reward.name: {config.domains[name].reward.name!r} is scored by processes that only a run starts")
    return name


def _typed(name: str, domain: DomainConfig) -> RewardType | None:
    """The reward if its type is built in, else None."""
    is_built_in = domain.reward.name in REWARDS
    return typed_reward(domain.reward.name, domain.reward.args, f"domains.{name}.reward") if is_built_in else None


def _references(name: str, domain: DomainConfig, prompts: PromptSet, look: Look) -> References | None:
    """References that the reward can and cannot read; None if its type does not read them first."""
    if not _reads_answer_first(name, domain):
        return None
    seconds = None if look.limit is None else REFERENCES_S
    return read_references(domain.reward, f"domains.{name}.reward", prompts, seconds, lambda read: _progress(read, len(prompts)))


def _reads_answer_first(name: str, domain: DomainConfig) -> bool:
    reward = _typed(name, domain)
    return reward is not None and reward.reads_answer_first


def _tries(name: str, domain: DomainConfig, config: RunConfig, look: Look) -> tuple[PromptSet, list[_Try]]:
    """The prompts (the whole split if all references are read), and the responses to score."""
    tokenizer = load_tokenizer(config.model.path)
    reads_all = _reads_answer_first(name, domain)
    if look.responses is None:
        nothing = _nothing_to_score(name, domain, look)
        limit = 1 if nothing else None if reads_all else look.limit
        prompts = load_prompts(name, domain, look.split, tokenizer, config.domains, limit)
        if nothing:
            own = (domain.data.prompt, domain.data.answer)
            columns = [column for column, value in prompts[0].columns.items() if isinstance(value, str) and column not in own]
            there_are = f"; there are {', '.join(columns)}" if columns else ""
            raise ValueError(f"{nothing}; give {INSTEAD}{there_are}")
        reward = _typed(name, domain)
        return prompts, [_reference(prompt, reward, look) for prompt in islice(prompts, look.limit)]
    given = _Given(name, domain, look)
    needed = None if reads_all else given.prompts_needed
    prompts = load_prompts(name, domain, look.split, tokenizer, config.domains, needed)
    return prompts, given.tries(prompts, tokenizer)


def _nothing_to_score(name: str, domain: DomainConfig, look: Look) -> str | None:
    """Why the reference answers cannot be scored as responses; None if they can or are not wanted."""
    if look.column is not None:
        return None
    if domain.data.answer is None:
        return f"domains.{name}.data.answer: there are no reference answers"
    reward = _typed(name, domain)
    what = reward.no_response() if reward is not None else None
    return f"domains.{name}.reward.name: nothing to score: the answers of {domain.reward.name!r} are {what}" if what else None


def _reference(prompt: Prompt, reward: RewardType | None, look: Look) -> _Try:
    if look.column is not None:
        if not isinstance(response := prompt.columns.get(look.column), str):
            raise ValueError(f"--column: prompt {prompt.uid} has no text in the column {look.column!r}; it has {', '.join(prompt.columns)}")
        return _Try(prompt, response)
    response = written(prompt.answer) if reward is None else reward.response_for(prompt.answer)
    if response is None:
        raise ValueError(
            f"prompt {prompt.uid}: its answer {prompt.answer!r:.80} is no text that could be a response; give --responses FILE"
        )
    return _Try(prompt, response)


def _sample(one: _Try) -> RewardInput:
    return RewardInput.of(one.prompt, one.response, one.finish_reason)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done} of {total}" if done < total else "\r\033[K")
        sys.stderr.flush()


class _Given:
    """Responses from a file."""

    def __init__(self, name: str, domain: DomainConfig, look: Look) -> None:
        assert look.responses is not None
        self._name = name
        self._domain = domain
        self._file = look.responses
        self._rows: list[tuple[Row, Mapping[str, Any]]] = []
        for row, content in self._readable(look.responses):
            if look.limit is not None and len(self._rows) >= look.limit:
                break
            self._rows.append((row, content))
        if not self._rows:
            raise ValueError(f"--responses: {look.responses} has no response of domain {name}")

    def _readable(self, file: Path) -> Iterator[tuple[Row, Mapping[str, Any]]]:
        """Lines of this domain with a response. The samples of a run include failed ones, which have none."""
        for row in read_rows(file.absolute()):
            content = row.content
            if isinstance(content, str):
                raise ValueError(f"--responses: {row.place}: {content}")
            if content.get("domain", self._name) != self._name or ("failure" in content and content.get("finish_reason") is None):
                continue
            if not isinstance(content.get("response"), str):
                raise ValueError(f"--responses: {row.place}: column 'response': must be a text, got {content.get('response')!r:.80}")
            uid, reason = content.get("prompt_uid"), content.get("finish_reason")
            if uid is None and "prompt" not in content:
                raise ValueError(f"--responses: {row.place}: which prompt? It needs `prompt_uid` or `prompt`")
            if uid is not None and type(uid) is not int:
                raise ValueError(f"--responses: {row.place}: column 'prompt_uid': must be a whole number, got {uid!r:.80}")
            if reason is not None and reason not in tuple(FinishReason):
                reasons = ", ".join(FinishReason)
                raise ValueError(f"--responses: {row.place}: column 'finish_reason': must be one of {reasons}, got {reason!r:.80}")
            yield row, content

    @property
    def prompts_needed(self) -> int | None:
        uids = [content.get("prompt_uid") for _, content in self._rows]
        return 1 + max(uid for uid in uids if uid is not None) if None not in uids else None

    def tries(self, prompts: PromptSet, tokenizer: Tokenizer) -> list[_Try]:
        template = Template(self._domain.template, self._domain.data.prompt, tokenizer, f"domains.{self._name}.template")
        by_text: dict[str, list[Prompt]] = {}
        if self.prompts_needed is None:
            for prompt in prompts:
                by_text.setdefault(prompt.text, []).append(prompt)
        return [self._try(row, content, prompts, by_text, template) for row, content in self._rows]

    def _try(
        self, row: Row, content: Mapping[str, Any], prompts: PromptSet, by_text: Mapping[str, Sequence[Prompt]], template: Template
    ) -> _Try:
        uid, texts = content.get("prompt_uid"), self._texts(content, template)
        if uid is None:
            found = [prompt for text in texts for prompt in by_text.get(text, [])]
            if not found or any(prompt.answer != found[0].answer for prompt in found):
                problem = "stands there with several answers; name one by `prompt_uid`" if found else "is not in the domain's data"
                raise ValueError(f"--responses: {row.place}: the prompt {content['prompt']!r:.80} {problem}")
            prompt = found[0]
        elif 0 <= uid < len(prompts):
            prompt = prompts[uid]
        else:
            raise ValueError(f"--responses: {row.place}: there is no prompt {uid}; the data has {len(prompts)}")
        if texts and prompt.text not in texts:
            message = f"prompt {prompt.uid} of the data is {prompt.text!r:.80}, not {content['prompt']!r:.80}"
            raise ValueError(f"--responses: {row.place}: {message}; is it of the other --split?")
        return _Try(prompt, content["response"], content.get("finish_reason") or FinishReason.STOP)

    def _texts(self, content: Mapping[str, Any], template: Template) -> list[str]:
        """Possible texts of the prompt: as given, or with the template applied."""
        if "prompt" not in content:
            return []
        texts = [content["prompt"]] if isinstance(content["prompt"], str) else []
        try:
            return [*texts, template.render({self._domain.data.prompt: content["prompt"]})]
        except RowError:  # the template needs further columns
            return texts
