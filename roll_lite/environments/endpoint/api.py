"""Common form of requests to the endpoint's APIs, and rules for their parameters."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from roll_lite.environments.base import Message

Json = dict[str, Any]

OVERRIDDEN = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("reasoning", "reasoning_effort", "thinking", "output_config", "chat_template_kwargs"),
    *("max_tool_calls", "context_management"),
)
"""Parameters of requests that have no effect: the run's own settings apply."""
OVER = ("episode_over", "the episode is over; no further response is possible")
"""Code and text of the error for requests beyond a limit."""
_DISTORTS = "it would change the probabilities that training relies on; leave it out"
_FREE_FORM = "describe the wanted form in the prompt"
_REFUSED: Sequence[tuple[str, Any, str]] = (
    ("n best_of", 1, "a request gets one response; send several requests"),
    ("repetition_penalty", 1, _DISTORTS),
    ("logit_bias presence_penalty frequency_penalty bad_words allowed_token_ids", None, _DISTORTS),
    ("response_format text.format", {"type": "text"}, _FREE_FORM),
    ("guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema regex ebnf", None, _FREE_FORM),
    ("output_format output_config.format", None, _FREE_FORM),
    ("logprobs prompt_logprobs echo suffix background truncate_prompt_tokens continue_final_message", None, "leave it out"),
    ("use_beam_search", None, _DISTORTS),
    ("conversation", None, "use previous_response_id, or send the whole conversation"),
    ("functions function_call", None, "use tools"),
)
"""Parameters that make a request fail: (names, harmless value, remedy). The harmless value is allowed, and so are empty ones (null, 0)."""


@dataclass(frozen=True)
class ChatRequest:
    messages: list[Message]
    """Roles are system, user, assistant and tool; contents are texts. Arguments of tool calls are dicts, or text if not valid JSON."""
    tools: list[Json]
    max_tokens: int | None
    stop: tuple[str, ...]
    text: str | None = None
    """Prompt of the completions API, which has no messages."""
    overridden: tuple[str, ...] = ()
    gives_thoughts: bool = True
    """False: the client gets the response without thoughts, so it cannot repeat them."""


class ChatReply(NamedTuple):
    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    stop_sequence: str | None = None
    """Stop string of the request that ended the response."""


class Session(Protocol):
    async def respond(self, request: ChatRequest) -> ChatReply:
        """Sample a response. EpisodeOver if no further one is possible, ValueError if the request is wrong."""
        ...

    def refused(self, why: str) -> None:
        """Record that a request got an error, unless because the episode is over."""
        ...


def as_sent(reply: ChatReply) -> ChatReply:
    """Convert a reply to the form in which clients send it back. A malformed tool call's text becomes the call's arguments or, if unnamed,
    part of the content."""
    message, calls, texts = reply.message, list[Message](), [reply.message.get("content")]
    for call in message.get("tool_calls") or ():
        if name := call["function"]["name"]:
            calls.append(call_of(call["id"], name, _parsed(call.get("text", call["function"]["arguments"]))))
        else:
            texts.append(call["text"])
    reason = reply.finish_reason
    if reason != "length":
        reason = "tool_calls" if calls else "stop"
    return reply._replace(message=_slim({**message, "content": "\n".join(filter(None, texts)), "tool_calls": calls}), finish_reason=reason)


def call_of(call_id: Any, name: Any, arguments: Any) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_text(call: Message) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _slim(message: Message) -> Message:
    return {key: one for key, one in message.items() if one or key == "content"}


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"{part!r:.80} is not supported; the model reads text only")
    return "\n".join(part["text"] for part in content)


def _parsed(arguments: Any) -> Any:
    with suppress(ValueError, TypeError, RecursionError):
        if isinstance(read := json.loads(arguments or "{}"), dict):
            return read
    return arguments


def _flat(tool: Any) -> Any:
    if isinstance(tool, dict) and "input_schema" not in tool and tool.get("type") != "function":
        raise ValueError(f"tools of type {tool.get('type')!r:.40} are not available; offer functions")
    return tool.get("function", tool) if isinstance(tool, dict) else tool


Text = Annotated[str, BeforeValidator(_joined)]


class _Function(BaseModel):
    name: str
    arguments: Annotated[Json | str, BeforeValidator(_parsed)]


class _Call(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: _Function


def _without_nulls(given: Any) -> Any:
    """Drop nulls, which must not hide another name of the same parameter. A message's content may be null."""
    return {key: one for key, one in given.items() if one is not None or key == "content"} if isinstance(given, dict) else given


class _Message(BaseModel):
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(lambda role: "system" if role == "developer" else role)]
    content: Text
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    _drop_nulls = model_validator(mode="before")(_without_nulls)


class _Conversation(BaseModel):
    messages: list[_Message]


class _Tool(BaseModel):
    name: str
    description: str | None = None
    parameters: Json | None = Field(None, validation_alias=AliasChoices("parameters", "input_schema"))


_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class ApiRequest(BaseModel, ABC):
    """Body of a request to one of the APIs; builds the API's response."""

    model_config = ConfigDict(extra="allow")
    model: str = "policy"
    stream: bool | None = None
    stop: Annotated[list[_Stop], BeforeValidator(lambda given: [given] if given and isinstance(given, str) else given or [])] = Field(
        [], validation_alias=AliasChoices("stop", "stop_sequences"), max_length=16
    )
    max_tokens: PositiveInt | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_output_tokens", "max_tokens"))
    tools: list[Annotated[_Tool, BeforeValidator(_flat)]] | None = None
    tool_choice: Annotated[str, BeforeValidator(lambda given: given.get("type") if isinstance(given, dict) else given or "auto")] = "auto"
    """`none`: the prompt has no tools. Other values act as `auto`: a call cannot be forced."""

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        for names, harmless, remedy in _REFUSED:
            for name in names.split():
                value = body
                for part in name.split("."):
                    value = value.get(part) if isinstance(value, dict) else None
                if value and value != harmless:
                    raise ValueError(f"{name}: {value!r:.80} is not possible; {remedy}")
        return _without_nulls(body)

    def request(self) -> ChatRequest:
        """Convert to the form common to all APIs; ValueError if messages are invalid."""
        messages = [_slim(one.model_dump()) for one in _Conversation.model_validate({"messages": self.conversation()}).messages]
        names: dict[str, str] = {}
        for message in messages:
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
            if message["role"] == "tool":
                if (call_id := message.get("tool_call_id")) not in names:
                    raise ValueError(f"a tool result is for call {call_id!r:.80}, which no message of the assistant before it made")
                message["name"] = names[call_id]
        tools = [] if self.tool_choice == "none" else self.tools or []
        return ChatRequest(
            messages,
            [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools],
            self.max_tokens,
            tuple(self.stop),
            overridden=(
                *(name for name in OVERRIDDEN if getattr(self, name, None) is not None),
                *(["tool_choice"] if self.tool_choice not in ("auto", "none") else []),
            ),
        )

    @abstractmethod
    def conversation(self) -> list[Message]:
        """Messages in the form of chat completions, not validated."""

    @abstractmethod
    def response(self, reply: ChatReply) -> Json:
        """Body of the response in this API's format. `reply`: converted by `as_sent`."""

    @abstractmethod
    def events(self, response: Json) -> Iterator[Json | str]:
        """Yield the data of each server-sent event. A field `type` is also sent as the event's name."""
