"""Render an episode's messages to tokens.

Sampled responses keep their tokens; only the text after them is tokenized. Text of users, tools and environments never becomes an added
token such as `<|im_end|>`: where it spells one, it is split after the first character and tokenized in parts.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from roll_lite.config.schema.domains import PlainTemplateConfig
from roll_lite.config.schema.environments import CallFormat
from roll_lite.data.templates import Template, Tokenizer
from roll_lite.environments.base import Message
from roll_lite.environments.tool_calls import ToolCallParser, family_of
from roll_lite.files import first_line

SENTINEL = f"SENTINEL{secrets.token_hex(16)}"
"""Content of the dummy assistant message that stands for a response when rendering. Trimming and JSON leave letters and digits unchanged.
Random, so that no message contains it."""
CALL_ID = "call00000"
QUESTION: Message = {"role": "user", "content": "Question"}
NEXT: Message = {"role": "user", "content": "Next7f3a9c51"}
RESULT: Message = {"role": "tool", "content": "Result7f3a9c51", "name": "tool", "tool_call_id": CALL_ID}
ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}, "required": ["text"]},
    },
}
"""Schema of unknown tools: tools of agents, and tools that need a started sandbox or index."""


class ChatRenderer:
    """Renderer with a chat template. `arguments`: its variables. `tools`: OpenAI schemas. `setting`: YAML path for error messages.
    `call_format`: format of tool calls; None: the template's. `end_ids`: tokens that end a response, besides those of template and
    tokenizer (such as Llama's <|eom_id|>)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        arguments: Mapping[str, Any],
        tools: Sequence[dict[str, Any]] | None,
        setting: str,
        call_format: CallFormat | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"{setting}.name: chat, but the tokenizer has no chat template; use name: plain")
        self._tokenizer = tokenizer
        self._text = _GuardedText(tokenizer)
        self._arguments = dict(arguments)
        self._tools = self._text.guard(list(tools)) if tools else None
        self._setting = setting
        self._remedy = f"name a template for multi-turn conversations in {setting}.file"
        self._template = tokenizer.get_chat_template(chat_template, self._tools)
        self._later_tools = self._tools
        """Tools for continuations; None, which is faster, if they do not change the text."""
        self._needs_calls = bool(tools)
        """True if the template renders tool results as usual only after a response with calls."""
        self._closing = self._after([], prompt=False)
        """Text that the template writes after the last assistant message's content."""
        self._end = self._text.first_added(self._text.encode(self._closing))[1]
        self._ends = {*end_ids, tokenizer.eos_token_id, self._end} - {None}
        self._check()
        form = call_format or (family_of(self._template) if tools else None)
        if tools and form is None:
            raise ValueError(f"{setting}: the form of the chat template's tool calls is unknown; name it in environment.call_format")
        self.thinking = self._after([NEXT]).rstrip().endswith("<think>")
        self._parser = ToolCallParser(tokenizer, form, tools or (), self.thinking)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._text.encode(self._render(self._guarded(messages), self._tools, prompt=True), start=True)

    def continuation(self, response_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between a response and the next: the end of the assistant's message (unless in the response), the new
        messages, and the generation prompt."""
        ids = self._text.encode(self._following(self._guarded(messages)))
        last = response_ids[-1] if response_ids else None
        place, first = self._text.first_added(ids)
        # GLM has no end-of-turn token: its responses end with the token that begins the next message.
        closed = first is not None and (last == first or (first == self._end and last in self._ends))
        return ids[place + 1 :] if closed else ids

    def text(self, text: str, after: bool = False) -> list[int]:
        return self._text.encode(text, start=not after)

    def exact(self, response_ids: Sequence[int]) -> str:
        return self._parser.decode(response_ids)

    def content_tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(self._text.encode(one.get("content") or "")) for one in self._guarded(messages))

    def message(self, response_ids: Sequence[int]) -> Message:
        return _message(self._parser, response_ids)

    def difference(self) -> str | None:
        found = defaultdict[tuple[str, str], list[str]](list)
        for kind, messages in _conversations(bool(self._tools)):
            try:
                whole = self._text.encode(self._render(messages, self._tools), start=True)
                ids = list(self._incremental(messages))
            except ValueError:  # the template refuses this kind of conversation, which the run may not need
                continue
            if ids != whole[: len(ids)]:
                place = _common(ids, whole)
                here, there = (self._tokenizer.decode(side[max(place - 4, 0) : place + 12]) for side in (ids, whole))
                found[here, there].append(kind)
        lines = [
            f"in a conversation with {' or '.join(kinds)}, an episode's tokens read {here!r} where the chat template, applied to the whole "
            f"conversation, writes {there!r}"
            for (here, there), kinds in found.items()
        ]
        return f"{self._setting}: " + "\n  ".join(lines) if lines else None

    def _incremental(self, messages: Sequence[Message]) -> Iterator[int]:
        response: list[int] | None = None
        start = 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                new = messages[start:number]
                yield from self.prompt(new) if response is None else self.continuation(response, new)
                before, text = self._render(messages[:number], self._tools, prompt=True), self._render(messages[: number + 1], self._tools)
                written = text[_common(before, text) :].removesuffix(self._closing)
                response = [*self._text.encode(written), *([] if self._end is None else [self._end])]
                yield from response
                start = number + 1

    def _check(self) -> None:
        """Raise ValueError if the template leaves out new messages or tools. Find out what continuations need."""
        if self._tools and self._render([QUESTION], self._tools) == self._render([QUESTION], None):
            raise ValueError(f"{self._setting}: the chat template ignores tools; {self._remedy}, or leave out the tools")
        kinds = [NEXT, RESULT] if self._tools else [NEXT]
        texts = [self._following([message]) for message in kinds]
        for message, text in zip(kinds, texts, strict=True):
            if message["content"] not in text:
                raise ValueError(f"{self._setting}: the chat template leaves out messages of the role {message['role']}; {self._remedy}")
        self._needs_calls = False
        if not self._writes(kinds, texts):
            self._needs_calls = bool(self._tools)
        self._later_tools = None
        if not self._writes(kinds, texts):
            self._later_tools = self._tools

    def _writes(self, kinds: Sequence[Message], texts: Sequence[str]) -> bool:
        with suppress(ValueError):
            return all(self._following([message]) == text for message, text in zip(kinds, texts, strict=True))
        return False

    def _guarded(self, messages: Sequence[Message]) -> list[Message]:
        return [self._text.guard(one, only_special=one["role"] == "assistant") for one in messages]

    def _following(self, messages: list[Message]) -> str:
        results = list(takewhile(lambda one: one["role"] == "tool", messages)) if self._needs_calls else []
        if results:
            calls = [_call(one.get("name", "tool"), {"text": SENTINEL}, one.get("tool_call_id", CALL_ID)) for one in results]
            with suppress(ValueError):  # the template may refuse several calls at once
                markup = self._after([], calls, prompt=False).removesuffix(self._closing)
                if (text := self._after(messages, calls)).startswith(markup):
                    return text.removeprefix(markup)
        return self._after(messages)

    def _after(self, messages: list[Message], calls: list[Any] | None = None, prompt: bool = True) -> str:
        """Render a dummy response (SENTINEL) and these messages; return the text after the sentinel."""
        response = {"role": "assistant", "content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": SENTINEL}
        _, found, text = self._render([QUESTION, response, *messages], self._later_tools, prompt).rpartition(SENTINEL)
        if not found:
            raise ValueError(f"{self._setting}: the chat template leaves out the assistant's messages; {self._remedy}")
        return text

    def _render(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self._template, tokenize=False, add_generation_prompt=prompt, **self._arguments
            )
        except Exception as error:  # templates may raise anything
            roles = ", ".join(one["role"] for one in messages)
            raise ValueError(f"{self._setting}: the chat template refuses messages of the roles {roles}: {first_line(error)}") from error


class PlainRenderer:
    """Renderer for base models: contents joined, without roles. `written`: the domain's template. Added tokens that occur in it, such as
    `<|im_end|>`, stay tokens in prompts."""

    thinking = False

    def __init__(self, tokenizer: Tokenizer, setting: str = "template", written: str = "") -> None:
        self._template = Template(PlainTemplateConfig(), "prompt", tokenizer, setting)
        self._text = _GuardedText(tokenizer)
        self._prompts = _GuardedText(tokenizer, written)
        self._parser = ToolCallParser(tokenizer, None)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text: str = self._prompts.guard("".join(one["content"] for one in messages))
        first, _, rest = text.partition(self._prompts.mark)
        return [*self._template.tokenize([first])[0], *self._prompts.encode(rest)]

    def text(self, text: str, after: bool = False) -> list[int]:
        return self._text.encode(text) if after else self._template.tokenize([text])[0]

    def exact(self, response_ids: Sequence[int]) -> str:
        return self._parser.decode(response_ids)

    def continuation(self, response_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self._text.encode(self._text.guard("".join(one["content"] for one in messages)))

    def content_tokens(self, messages: Sequence[Message]) -> int:
        return len(self.continuation((), messages))

    def message(self, response_ids: Sequence[int]) -> Message:
        return _message(self._parser, response_ids)

    def difference(self) -> str | None:
        return None


def _message(parser: ToolCallParser, response_ids: Sequence[int]) -> Message:
    content, calls = parser.parse(response_ids)
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class _GuardedText:
    """Tokenizes texts of users and tools as plain text: `guard` marks cuts inside added tokens, `encode` tokenizes the parts."""

    def __init__(self, tokenizer: Tokenizer, allowed: str = "") -> None:
        added = tokenizer.added_tokens_decoder
        guarded = [token for token in added.values() if token.content not in allowed]
        self._tokenizer = tokenizer
        self._added = frozenset(added)
        self._all = _first_characters(token.content for token in guarded)
        self._special = _first_characters(token.content for token in guarded if token.special)
        self.mark = f"cut{secrets.token_hex(16)}"
        self._line_break = self._ids("\n")

    def guard(self, value: Any, only_special: bool = False) -> Any:
        """Mark cuts where a value's texts spell an added token or, with `only_special`, a special one."""
        if isinstance(value, str):
            # Tokenizers refuse lone surrogates, which JSON can spell.
            text = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return (self._special if only_special else self._all).sub(rf"\g<0>{self.mark}", text)
        if isinstance(value, Mapping):
            return {self.guard(key, only_special): self.guard(item, only_special) for key, item in value.items()}
        return [self.guard(item, only_special) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, start: bool = False) -> list[int]:
        """Tokenize a text marked by `guard`, in parts. `start`: it starts the sequence."""
        parts = text.split(self.mark)
        first = self._ids(parts[0]) if start else self._ids_behind(parts[0])
        return [*first, *(one for part in parts[1:] for one in self._ids_behind(part))]

    def first_added(self, ids: Sequence[int]) -> tuple[int, int | None]:
        return next(((place, one) for place, one in enumerate(ids) if one in self._added), (len(ids), None))

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _ids_behind(self, text: str) -> list[int]:
        """Tokenize text that follows other text: behind a line break, whose tokens are dropped, since SentencePiece adds a space at
        the start."""
        ids = self._ids(f"\n{text}")
        length = len(self._line_break)
        return ids[length:] if ids[:length] == self._line_break else self._ids(text)


def _first_characters(texts: Iterable[str]) -> re.Pattern[str]:
    """Build a pattern for the first character of each occurrence of these texts, even if overlapping."""
    tails = _tails(text for text in texts if len(text) > 1 and not text.isspace())
    return re.compile("|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in tails.items()) or "(?!)")


def _any_of(texts: Sequence[str]) -> str:
    """Build a pattern for any of these texts, for a lookahead. A prefix tree, since models have thousands of added tokens."""
    if "" in texts:
        return ""
    branches = [re.escape(first) + _any_of(rest) for first, rest in _tails(texts).items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _tails(texts: Iterable[str]) -> dict[str, list[str]]:
    tails = defaultdict(list)
    for text in texts:
        tails[text[0]].append(text[1:])
    return tails


def _call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _conversations(tools: bool) -> Iterator[tuple[str, list[Message]]]:
    answer: Message = {"role": "assistant", "content": "The answer is 42."}
    turns = [QUESTION, answer, {"role": "user", "content": "Try again."}, answer]
    yield "two turns", turns
    yield "a system message", [{"role": "system", "content": "Be short."}, *turns]
    yield "thoughts", [QUESTION, {"role": "assistant", "content": "<think>\nFirst think.\n</think>\n\nThe answer is 41."}, *turns[2:]]
    if tools:
        ids = ["call00001", "call00002"]
        calls = [_call("search", {"text": name}, call_id) for name, call_id in zip("ab", ids, strict=True)]
        results = [
            {"role": "tool", "name": "search", "content": f"Found {name}.", "tool_call_id": call_id}
            for name, call_id in zip("ab", ids, strict=True)
        ]
        for count, kind in ((1, "a tool call"), (2, "two tool calls at once")):
            yield kind, [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls[:count]}, *results[:count], answer, *turns[2:]]
