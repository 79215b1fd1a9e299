from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, NonNegativeFloat, PositiveInt

from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.base import Mistakes, rule
from roll_lite.config.schema.domains import Pattern
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.text_templates import compile_format, placeholders
from roll_lite.data.samples import RewardInput, Score
from roll_lite.files import is_folder
from roll_lite.models.model_files import chat_templates
from roll_lite.rewards.answer_extraction import CUT, finished, is_cut, without_thinking
from roll_lite.rewards.base import ResponseSuspected, RewardFailed
from roll_lite.rewards.http.client import Addresses, AskingReward, HttpClient, several
from roll_lite.rewards.placeholders import checked_template, columns_in, filled
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.text.format import FORMAT_SECONDS

Api = Literal["chat", "completions"]
TEMPLATE = """Is the response a correct and complete answer to the question?

[Question]
{question}

[Reference answer]
{answer}

[Response, all that is between the two lines {fence}]
{fence}
{response}
{fence}

End your reply with a line of its own, either "Verdict: yes" or "Verdict: no"."""
ADDRESS = {"url": "url, the endpoint's address, such as https://host/v1", "model": "model, its name at the endpoint"}
ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
AGAIN_TEMPERATURE = 0.7
"""Minimum temperature when asking again: greedy sampling would repeat the answer."""
SHOWN_CHARACTERS, KEPT_CHARACTERS = 200, 1000


class JudgeReward(AskingReward):
    """Score by the verdict of a language model behind an OpenAI-compatible endpoint.

    The judge is `model` at `url`, or `server`, which the run starts itself. Without `pattern`, `choices` and `scale`, the verdict is yes
    (1) or no (0). It is the last line of the judge's text, such as "Verdict: yes" or "7/10", or a final JSON object such as
    {"verdict": "yes"}, as from guided decoding (`extra_body`). Other verdicts, and a last line after an unfinished sentence ("The response
    ends with"), are ignored: the judge may quote the response.

    If a verdict is unreadable or cut at `max_tokens`, the judge is asked again, `asks` times in all. A response without a verdict, or
    refused by the endpoint, gets the lowest value (0, or a negative choice); if a harmless response gets none either, the sample fails.

    ```yaml
    reward:
      name: judge
      args:
        url: https://judge.example/v1
        model: the-judge
        api_key_env: JUDGE_API_KEY      # the variable's name, never the key
      timeout_s: 60
    ```
    """

    url: Addresses | None = None
    """Base URL of the endpoint, such as https://host/v1, or several."""
    server: str | None = None
    """Name of a judge that the run starts itself, instead of url and model."""
    model: str | None = None
    """Name of the model at the endpoint."""
    api: Api = "chat"
    """API of the endpoint."""
    template: Annotated[str, AfterValidator(checked_template)] = TEMPLATE
    """Question to the judge. Filled in: {question} (as in the data), {prompt} (with the chat template), {response}, {answer} and data
    columns in braces; {{ and }} give braces. {fence} becomes a line that the response cannot contain, to put before and after it."""
    system: str | None = None
    """System message."""
    pattern: Pattern | None = None
    r"""Regular expression for the verdict in the judge's text: the first group of its last match, or the whole match. It also matches
    quotations: anchor it with `\Z` if the judge may quote verdicts."""
    choices: dict[str, float] | None = None
    """Accepted verdicts, with their values."""
    scale: tuple[float, float] | None = None
    """Lowest and highest number that the judge may give, mapped to 0 and 1."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: PositiveInt | None = 256
    """Maximum tokens of the judge's text."""
    stop: tuple[str, ...] = ()
    """Stop texts of the judge."""
    extra_body: dict[str, Any] | None = None
    """Further fields of the request."""
    asks: PositiveInt = 2
    """Attempts to get a readable verdict."""

    @rule
    def _of_numbers(self) -> Mistakes:
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            yield "scale", "the first number has to be less than the second"
        if self.scale is not None and self.choices is not None:
            yield "scale", "is of numbers, and the choices say what each verdict is worth; remove one"

    @rule
    def _has_an_address(self) -> Mistakes:
        missing = [text for name, text in ADDRESS.items() if getattr(self, name) is None]
        if self.server is None and missing:
            yield "", f"needs {' and '.join(missing)}, or server, one of the run's own judges"

    async def __call__(self, sample: RewardInput) -> Score:
        if self.url is None or self.model is None:
            where = "only a run starts the judges of its configuration; give url and model"
            raise RewardFailed(f"reward judge: server {self.server!r} has no address here: {where}")
        messages = [{"role": "user", "content": self.question_about(sample)}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        text = "\n\n".join(message["content"] for message in messages)
        question: dict[str, Any] = {"messages": messages} if self.api == "chat" else {"prompt": text}
        optional = {"max_tokens": self.max_tokens, "stop": self.stop or None}
        request: dict[str, Any] = {"model": self.model, "temperature": self.temperature, **question}
        request |= {name: value for name, value in optional.items() if value is not None} | (self.extra_body or {})
        for _ in range(self.asks):
            said = await _said(self._client, request)
            if said is not None and (verdict := read_verdict(said, self.pattern, self.choices, self.scale)) is not None:
                value, extracted = verdict
                return Score(value, None, {"extracted": extracted, "verdict": said[:KEPT_CHARACTERS]})
            request["temperature"] = max(request["temperature"], AGAIN_TEMPERATURE)
        problem = "did not finish within max_tokens" if said is None else f"gave no verdict that can be read: {said[:SHOWN_CHARACTERS]!r}"
        raise ResponseSuspected(f"reward judge: {f'asked {self.asks} times, ' if self.asks > 1 else ''}the judge {problem}")

    @cached_property
    def _client(self) -> HttpClient:
        end = ENDPOINTS[self.api]
        return HttpClient("judge", [url.rstrip("/").removesuffix(end) + end for url in several(self.url or ())], self)

    def question_about(self, sample: RewardInput) -> str:
        return filled(self.template, sample, "judge", f"{finished(sample)}\n[The response was {CUT}.]" if is_cut(sample) else None)

    def lowest(self) -> float:
        return min([0.0, *(self.choices or {}).values()])

    def needs_answer(self) -> bool:
        return "answer" in placeholders(self.template)

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"template": columns_in(self.template)}

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        yield from super().in_run(config, place, timeout_s)
        if self.server is None:
            return
        for unneeded in ADDRESS:
            if getattr(self, unneeded) is not None:
                yield Problem(f"{place}.args.{unneeded}", "is the run's to say where there is a server; remove it, or server")
        known = config.judges
        if self.server not in known:
            hint = did_you_mean(self.server, known) if known else "there is no section `judges` yet"
            yield Problem(f"{place}.args.server", f"no such judge; {hint}", self.server)
            return
        folder = known[self.server].path
        if self.api == "chat" and is_folder(folder) and not chat_templates(folder):
            yield Problem(f"{place}.args.api", f"the tokenizer in {folder} has no chat template; use completions", self.api)


async def _said(client: HttpClient, request: dict[str, Any]) -> str | None:
    answer, url = await client.post(request)
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        is_cut = choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError):
        told = f"no choices[0] with a message or text in the answer: {json.dumps(answer):.200}"
        raise ResponseSuspected(f"reward judge: {url}: {told}") from None
    if not isinstance(text, str | None):
        raise ResponseSuspected(f"reward judge: {url}: the message's content is no string: {text!r:.80}")
    return None if is_cut else text or ""


# ---------------------------------------------------------------- verdicts

KEYS = ("verdict", "score", "rating", "grade", "judgment", "judgement", "answer")
"""Keys of a verdict, preferred first. `answer` is last, because it may repeat the response's answer."""
NAMES = rf"(?:(?:the|my|final|overall)[*_ ]+)*(?:{'|'.join(KEYS)})"
LINE = (
    rf"(?i)(?:\A|\n)[ \t*_`#(\[]*(?:{NAMES}[*_ ]*(?:\([^()\n]*\)[*_ ]*)?(?:[:=]|\bis\b)[*_ ]*:?)?"
    r"[\s*_`(\[]*(?P<value>{value}){out_of}[\s*_`)\].!]*\Z"
)
OBJECT = r"(?s)(?:\A|\n)[ \t]*(?:```\w*\s*)?(?P<value>\{.*\})\s*(?:```)?\Z"
NUMBER = r"[-+]?\d+(?:\.\d+)?"

OPEN_QUOTE = re.compile(r"(?s)[“«「『《](?!.*[”»」』》])|(?:‘|(?<![^\s(\[{])')(?!.*\S['’](?!\w))")
BREAKS_OFF = re.compile(
    rf"(?i)(?!\W*(?:here(?:['’]s| is) )?{NAMES}\W*\Z)"
    r"(?:.*[:：]|(?!\s*(?:#|[-+*•]\s|(?:\d+|\w)[.)]\s|\*\*(?!.*\*\*))).*(?:[^\W\d_\u0e00-\u0eff]|[,;、，；—–(\[{]))\Z"
)
"""Pattern of a line that may introduce a quotation: it ends with a colon or in mid-sentence. Excluded: headings, list items without a
colon, and Thai and Lao, which have no full stop."""


def read_verdict(
    text: str, pattern: str | None = None, choices: Mapping[str, float] | None = None, scale: tuple[float, float] | None = None
) -> tuple[float, str] | None:
    """Return (value, text) of the judge's own verdict, not a quoted one; arguments as in `JudgeReward`. None without a verdict, or if the
    search takes too long."""
    choices = {"yes": 1.0, "no": 0.0} if (choices, pattern, scale) == (None, None, None) else choices
    known = None if choices is None else {choice.strip().casefold(): value for choice, value in choices.items()}
    try:
        found = limited(FORMAT_SECONDS, lambda: _found(without_thinking(text).strip(), pattern, known, scale)).strip()
        value = float(found) if known is None else known[found.casefold()]
    except (TimeLimitExceeded, KeyError, ValueError):
        return None
    low, high = scale or (-math.inf, math.inf)
    if not (math.isfinite(value) and low <= value <= high):
        return None
    return (value - low) / (high - low) if scale else value, found


def _found(text: str, pattern: str | None, known: Mapping[str, float] | None, scale: tuple[float, float] | None) -> str:
    if pattern is not None:
        *_, last = [None, *compile_format(pattern).finditer(text)]
        return "" if last is None else next((group for group in last.groups() if group is not None), last[0])
    value = NUMBER if known is None else "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    out_of = rf"(?:[*_\s]*(?:/|(?:out )?of)[*_\s]*{re.escape(f'{scale[1]:g}')})?" if scale else ""
    text = re.sub(r'\A"([^"]*)"\Z', r"\1", text)
    verdict = re.search(LINE.format(value=value, out_of=out_of), text) or re.search(OBJECT, text)
    if verdict is None:
        return ""
    before, found = text[: verdict.start()], verdict["value"]
    is_quoted = OPEN_QUOTE.search(before) or any(before.count(mark) % 2 for mark in '"`')
    if is_quoted or BREAKS_OFF.match(before.rstrip(" \t\n*_=~-").rpartition("\n")[2]):
        return ""
    if not found.startswith("{"):
        return found
    try:
        content = {name.casefold(): value for name, value in json.loads(found).items()}
    except (ValueError, RecursionError):
        return ""
    value = next((content[key] for key in KEYS if key in content), "")
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
