from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, Field

from roll_lite.environments.base import Message
from roll_lite.environments.endpoint.api import ApiRequest, ChatReply, ChatRequest, Json, Text, call_of

_MALFORMED = "INVALID_JSON"
"""Key for arguments that are not valid JSON, because a tool call's `input` must be an object. The name is from Anthropic's documentation.
"""


class _ThreadError(ValueError):
    code = "thread_unsupported_request"
    """Error code that makes Anthropic's client send the whole conversation, not a reference to it."""


class _Block(BaseModel):
    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: Json = {}
    tool_use_id: str | None = None
    content: Text = ""


class _Turn(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given)]


class Messages(ApiRequest):
    messages: list[_Turn] = Field(min_length=1)
    system: Text = ""
    thinking: Json | None = None
    thread: Any = None

    @property
    def _thinks(self) -> bool:
        return (self.thinking or {"type": "disabled"}).get("type") != "disabled"

    def request(self) -> ChatRequest:
        return replace(super().request(), gives_thoughts=self._thinks)

    def conversation(self) -> list[Message]:
        if self.messages[-1].role == "assistant":
            raise ValueError("messages: the last one is the assistant's, but a response cannot be begun for the model; end with the user's")
        if self.thread:
            raise _ThreadError("thread: conversations are not kept; send the whole one without it")
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.messages:
            results = [one for one in turn.content if one.type == "tool_result"]
            messages += [{"role": "tool", "content": one.content, "tool_call_id": one.tool_use_id} for one in results]
            if results != turn.content or not turn.content:  # an empty response comes back without blocks
                calls = [call_of(one.id, one.name, one.input.get(_MALFORMED, one.input)) for one in turn.content if one.type == "tool_use"]
                text = "\n".join(one.text for one in turn.content if one.type == "text")
                thoughts = "\n".join(one.thinking for one in turn.content if one.type == "thinking")
                messages.append({"role": turn.role, "content": text, "reasoning_content": thoughts, "tool_calls": calls})
        return messages

    def response(self, reply: ChatReply) -> Json:
        message, content = reply.message, list[Json]()
        if (thoughts := message.get("reasoning_content")) and self._thinks:
            content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            given = {_MALFORMED: arguments} if isinstance(arguments, str) else arguments
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
        stop = reply.stop_sequence if reply.finish_reason == "stop" else None
        reasons = {"stop": "stop_sequence" if stop else "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reasons[reply.finish_reason],
            "stop_sequence": stop,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    def events(self, response: Json) -> Iterator[Json]:
        yield {"type": "message_start", "message": {**response, "content": [], "stop_reason": None, "stop_sequence": None}}
        for number, block in enumerate(response["content"]):
            key = "input" if block["type"] == "tool_use" else block["type"]
            delta = {"type": f"{key}_delta", key: block[key]}
            if key == "input":
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block[key])}
            yield {"type": "content_block_start", "index": number, "content_block": {**block, key: type(block[key])()}}
            yield {"type": "content_block_delta", "index": number, "delta": delta}
            yield {"type": "content_block_stop", "index": number}
        ended = {"stop_reason": response["stop_reason"], "stop_sequence": response["stop_sequence"]}
        yield {"type": "message_delta", "delta": ended, "usage": response["usage"]}
        yield {"type": "message_stop"}
