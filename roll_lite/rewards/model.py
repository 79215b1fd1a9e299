"""Reward `model`: a sequence-classification reward model scores the response. This is the domain's side; the models run in clusters
(workers/reward_model.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationInfo, field_validator

from roll_lite.config.files import is_folder
from roll_lite.config.model_files import chat_templates
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.text_templates import placeholders
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.placeholders import checked_template, columns_in, filled, filling, is_chat
from roll_lite.rewards.reward_type import RewardType

ScoredText = str | list[dict[str, str]]
"""Input of a reward model: a text, or chat messages for its chat template."""

CHAT = "chat"


def _is_text(text: str) -> str:
    placeholders(text)
    return text


def _is_template(template: str) -> str:
    return template if template == CHAT else checked_template(template)


class ModelReward(RewardType):
    """A sequence-classification reward model scores the response: the output of the one that `reward_models.<model>` describes.

    A copy of the model takes up to `micro_batch_size` samples at a time, of whichever domains, and reads them in one forward pass, or in
    several where one would have more than `micro_batch_tokens`.

    A response that makes the text longer than the model's max_length scores 0. A process of a reward model that dies is started again:
    with `hf` that one, on Megatron all of the model's. The samples that it was scoring fail with the cause and are tried again
    (`retries`). The other copies serve on. Without any copy, samples wait until the model is back, and their `timeout_s` does not run
    meanwhile. `reward/workers_replaced` counts the replaced processes.

    ```yaml
    reward_models:
      helpful:
        path: models/reward-model
    domains:
      chat:
        reward:
          name: model
          args: {model: helpful, scale: sigmoid}
    ```
    """

    within_a_run = True

    model: str
    """Name of the model in the section `reward_models`."""
    template: Annotated[str, AfterValidator(_is_template)] = "{prompt}{response}"
    """The text that the model reads. {prompt} is the policy's input with its template applied, {question} the prompt as the data has it,
    {response} the policy's response without special tokens and thinking, {answer} the reference answer, any other name a column of the
    data. chat: the reward model's own chat template instead, with `question` as the user's message and the response as the assistant's."""
    question: Annotated[str, AfterValidator(_is_text)] = "{question}"
    """With `template: chat`, the user's message, a text with the same placeholders. Where it is one placeholder for a list of chat
    messages, the response follows them."""
    scale: Literal["none", "sigmoid"] = "none"
    """The output as it is, or its sigmoid, between 0 and 1."""
    threshold: float = 0.0
    """A response is correct where the unscaled output is above it."""

    @field_validator("question")
    @classmethod
    def _of_a_chat(cls, question: str, others: ValidationInfo) -> str:
        if others.data.get("template", CHAT) != CHAT:
            raise ValueError(f"is only used with template: {CHAT}; remove it")
        return question

    def __call__(self, sample: RewardInput) -> Score:
        raise RewardFailed(f"reward model: {self.model!r} scores within a run only, in the processes that hold the model")

    def needs_answer(self) -> bool:
        return "answer" in placeholders(self._text_read())

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"question" if self.template == CHAT else "template": columns_in(self._text_read())}

    def _text_read(self) -> str:
        return self.question if self.template == CHAT else self.template

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        known = config.reward_models
        if self.model not in known:
            hint = did_you_mean(self.model, known) if known else "there is no section `reward_models` yet"
            yield Problem(f"{place}.args.model", f"no such reward model; {hint}", self.model)
        elif self.template == CHAT and is_folder(known[self.model].path) and not chat_templates(known[self.model].path):
            message = f"the tokenizer in {known[self.model].path} has no chat template; write one as text, such as '{{prompt}}{{response}}'"
            yield Problem(f"{place}.args.template", message, CHAT)

    def model_input(self, sample: RewardInput) -> ScoredText:
        """The reward model's input for a sample; RewardFailed if a column is missing."""
        if self.template != CHAT:
            return filled(self.template, sample, "model")
        response = {"role": "assistant", "content": str(filling("response", sample))}
        asked = filling(self.question[1:-1], sample) if self.question.startswith("{") else None
        if is_chat(asked):
            return [*asked, response]
        return [{"role": "user", "content": filled(self.question, sample, "model")}, response]

    def score_of(self, output: float) -> Score:
        if not math.isfinite(output):
            raise RewardFailed(f"reward model: its output is {output}, which is not finite")
        value = output
        if self.scale == "sigmoid":
            value = 1 / (1 + math.exp(-output)) if output >= 0 else math.exp(output) / (1 + math.exp(output))
        return Score(value, output > self.threshold, {"reward_model": output})


def nothing(sample: RewardInput) -> float:
    """Zero, to which reward workers add the domain's terms and format; the model's output is added later."""
    return 0.0
