from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.base import Mistakes, rule
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.text_templates import placeholders
from roll_lite.data.samples import RewardInput, Score
from roll_lite.files import is_folder
from roll_lite.models.model_files import chat_templates
from roll_lite.rewards.base import ResponseSuspected, RewardFailed, RewardType
from roll_lite.rewards.placeholders import checked_template, columns_in, filled, filling, is_chat

ScoredText = str | list[dict[str, str]]

CHAT = "chat"
QUESTION = "{question}"


def _is_text(text: str) -> str:
    placeholders(text)
    return text


class ModelReward(RewardType):
    """Score a response with the sequence-classification model `reward_models.<model>`. If the text is longer than the model's max_length,
    the score is 0. If the model's outputs may be negative, use `scale: sigmoid`; otherwise a bad response may score below one that is too
    long.

    If a process of the model dies, or a batch takes 600 s, it is restarted (with Megatron: all processes). Its samples, and without
    another replica all that wait, fail and are retried (`retries`). `timeout_s` counts only while a replica scores the sample.

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
    """Name in the section `reward_models`."""
    template: Annotated[str, AfterValidator(lambda text: text if text == CHAT else checked_template(text))] = "{prompt}{response}"
    """Text that the model reads, or `chat`. {prompt} is the policy's input with its template applied, {question} the prompt as in the data,
    {response} the response without special tokens and thinking, {answer} the reference answer, any other name a data column. `chat` applies
    the reward model's chat template to `question` (user) and the response (assistant)."""
    question: Annotated[str, AfterValidator(_is_text)] = QUESTION
    """User message for `template: chat`, with the placeholders of `template`.

    If it is a single placeholder and its value is a list of chat messages, the model reads these messages and then the response.
    """
    scale: Literal["none", "sigmoid"] = "none"
    """none: the score is the model's output. sigmoid: its sigmoid, between 0 and 1."""
    threshold: float = 0.0
    """Model output, before `scale`, above which a response is correct."""

    @rule
    def _of_a_chat(self) -> Mistakes:
        if self.question != QUESTION and self.template != CHAT:
            yield "question", f"is only used with template: {CHAT}; remove it"

    def __call__(self, sample: RewardInput) -> Score:
        raise RewardFailed(f"reward model: {self.model!r} scores within a run only, in the processes that hold the model")

    def needs_answer(self) -> bool:
        return "answer" in placeholders(self.question if self.template == CHAT else self.template)

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"question": columns_in(self.question)} if self.template == CHAT else {"template": columns_in(self.template)}

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        known = config.reward_models
        if self.model not in known:
            hint = did_you_mean(self.model, known) if known else "there is no section `reward_models` yet"
            yield Problem(f"{place}.args.model", f"no such reward model; {hint}", self.model)
        elif self.template == CHAT and is_folder(known[self.model].path) and not chat_templates(known[self.model].path):
            message = f"the tokenizer in {known[self.model].path} has no chat template; write one as text, such as '{{prompt}}{{response}}'"
            yield Problem(f"{place}.args.template", message, CHAT)

    def model_input(self, sample: RewardInput) -> ScoredText:
        if self.template != CHAT:
            return filled(self.template, sample, "model")
        response = {"role": "assistant", "content": str(filling("response", sample))}
        asked = filling(self.question[1:-1], sample) if self.question.startswith("{") else None
        if is_chat(asked):
            return [*asked, response]
        return [{"role": "user", "content": filled(self.question, sample, "model")}, response]

    def score_of(self, output: float) -> Score:
        if not math.isfinite(output):
            raise ResponseSuspected(f"reward model: its output is {output}, which is not finite")
        value = output
        if self.scale == "sigmoid":  # precise for small values too
            value = 1 / (1 + math.exp(-output)) if output >= 0 else math.exp(output) / (1 + math.exp(output))
        return Score(value, output > self.threshold, {"reward_model": output})


def zero_base(sample: RewardInput) -> float:
    """Return 0: the reward model's score is added later."""
    return 0.0
