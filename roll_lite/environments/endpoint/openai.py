from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr

from roll_lite.environments.base import Message
from roll_lite.environments.endpoint.api import ApiRequest, ChatReply, ChatRequest, Json, Text, arguments_text, call_of


class ChatCompletions(ApiRequest):
    messages: list[Json] = Field(min_length=1)
    stream_options: Json | None = None

    def conversation(self) -> list[Message]:
        return [{"content": None, **one} if one.get("role") == "assistant" else one for one in self.messages]

    def response(self, reply: ChatReply) -> Json:
        calls = [call_of(call["id"], call["function"]["name"], arguments_text(call)) for call in reply.message.get("tool_calls", ())]
        message = {**reply.message, "content": reply.message["content"] or (None if calls else "")}
        return self._body("chat.completion", reply, {"message": {**message, "tool_calls": calls} if calls else message})

    def _body(self, kind: str, reply: ChatReply, choice: Json) -> Json:
        total = reply.prompt_tokens + reply.completion_tokens
        return {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": [{"index": 0, **choice, "finish_reason": reply.finish_reason}],
            "usage": {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens, "total_tokens": total},
        }

    def events(self, response: Json) -> Iterator[Json | str]:
        usage = response.pop("usage")
        response["object"] = response["object"].replace("chat.completion", "chat.completion.chunk")
        for choice in self._pieces(response["choices"][0]):
            yield {**response, "choices": [{"index": 0, "finish_reason": None, **choice}]}
        if (self.stream_options or {}).get("include_usage"):
            yield {**response, "choices": [], "usage": usage}
        yield "[DONE]"

    def _pieces(self, choice: Json) -> Iterator[Json]:
        message = choice["message"]
        yield {"delta": {"role": "assistant", "content": ""}}
        yield from ({"delta": {key: message[key]}} for key in ("reasoning_content", "content") if message.get(key))
        for number, call in enumerate(message.get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": number, **call}]}}
        yield {"delta": {}, "finish_reason": choice["finish_reason"]}


class Completions(ChatCompletions):
    messages: list[Json] = Field([], max_length=0)
    prompt: Annotated[str, BeforeValidator(lambda given: given[0] if isinstance(given, list) and len(given) == 1 else given)]

    def request(self) -> ChatRequest:
        return replace(super().request(), text=self.prompt)

    def response(self, reply: ChatReply) -> Json:
        return self._body("text_completion", reply, {"text": reply.message["content"]})

    def _pieces(self, choice: Json) -> Iterator[Json]:
        yield choice


class _Item(BaseModel):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    role: str | None = None
    content: Text = ""
    summary: Text = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text | None = None


class Responses(ApiRequest):
    input: Annotated[list[_Item], BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given)]
    instructions: Text = ""
    prompt: None = None
    """Prompts stored at OpenAI are not supported."""
    previous_response_id: str | None = None
    _kept: dict[str, list[Message]] = PrivateAttr()
    _new: list[Message] = PrivateAttr()

    def model_post_init(self, kept: dict[str, list[Message]]) -> None:
        """Store `kept`, the server's validation context: the episode's conversations by response id, and their messages by digest."""
        self._kept = kept

    def conversation(self) -> list[Message]:
        if self.previous_response_id and self.previous_response_id not in self._kept:
            raise ValueError(f"previous_response_id: this episode has no response {self.previous_response_id!r:.80}")
        new: list[Message] = []
        for item in self.input:
            last: Message = new[-1] if new else {"role": ""}
            if item.type == "function_call_output":
                new.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            elif item.type == "function_call":
                if last["role"] != "assistant":
                    new.append(last := {"role": "assistant", "content": ""})
                last["tool_calls"] = [*last.get("tool_calls", ()), call_of(item.call_id, item.name, item.arguments)]
            elif item.type == "reasoning":
                known = self._kept.get(item.id or "", [{}])[0].get("reasoning_content")  # some clients repeat the id only
                new.append({"role": "assistant", "content": "", "reasoning_content": item.content or item.summary or known})
            elif item.role == last["role"] == "assistant" and not last["content"] and "tool_calls" not in last:
                last["content"] = item.content
            else:
                new.append({"role": item.role, "content": item.content})
        self._new = new
        system = [{"role": "system", "content": self.instructions}] if self.instructions else ()
        return [*system, *self._kept.get(self.previous_response_id or "", ()), *new]

    def response(self, reply: ChatReply) -> Json:
        message, output, response_id = reply.message, list[Json](), f"resp_{uuid4().hex}"
        is_cut = reply.finish_reason == "length"
        # Clients may send the whole conversation each time: messages that are already kept are shared.
        hashed = ((sha256(repr(one).encode()).hexdigest(), one) for one in self._new)
        new = [self._kept.setdefault(digest, [one])[0] for digest, one in hashed]
        self._kept[response_id] = [*self._kept.get(self.previous_response_id or "", ()), *new, message]
        if thoughts := message.get("reasoning_content"):
            self._kept[item_id := f"item_{uuid4().hex}"] = [message]
            part = {"type": "reasoning_text", "text": thoughts}
            output.append({"id": item_id, "type": "reasoning", "summary": [], "content": [part]})
        if message["content"] or not (thoughts or message.get("tool_calls")):  # the client repeats an empty response too
            part = {"type": "output_text", "text": message["content"], "annotations": []}
            output.append({"type": "message", "role": "assistant", "content": [part], **({"status": "incomplete"} if is_cut else {})})
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], arguments_text(call)
            output.append({"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments})
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": self.model,
            "previous_response_id": self.previous_response_id,
            "output": [{"id": f"item_{uuid4().hex}", "status": "completed", **item} for item in output],
            "parallel_tool_calls": True,
            "tool_choice": self.tool_choice if self.tool_choice in ("none", "required") else "auto",
            "tools": [{"type": "function", **tool.model_dump()} for tool in self.tools or ()],
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def events(self, response: Json) -> Iterator[Json]:
        for number, (kind, event) in enumerate(self._events(response)):
            yield {"type": f"response.{kind}", "sequence_number": number, **event}

    def _events(self, response: Json) -> Iterator[tuple[str, Json]]:
        begun = {"response": {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}}
        yield "created", begun
        yield "in_progress", begun
        for number, item in enumerate(response["output"]):
            empty: Json = {"content": []} if "content" in item else {"arguments": ""}
            yield "output_item.added", {"output_index": number, "item": {**item, "status": "in_progress", **empty}}
            place = {"output_index": number, "item_id": item["id"]}
            if "arguments" in item:
                yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
                yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}
            for part in item.get("content", ()):
                place |= {"content_index": 0, "logprobs": []}
                yield "content_part.added", {**place, "part": {**part, "text": ""}}
                yield f"{part['type']}.delta", {**place, "delta": part["text"]}
                yield f"{part['type']}.done", {**place, "text": part["text"]}
                yield "content_part.done", {**place, "part": part}
            yield "output_item.done", {"output_index": number, "item": item}
        yield response["status"], {"response": response}
