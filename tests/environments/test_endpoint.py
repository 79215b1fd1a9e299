"""The endpoint, asked by OpenAI's own client, and by plain HTTP in Anthropic's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response
from support_endpoint import WEATHER, ScriptedSession, call, says, serving
from yarl import URL

from roll_lite.environments.base import EpisodeOver
from roll_lite.environments.endpoint import server as server_module
from roll_lite.environments.endpoint.api import as_sent
from roll_lite.environments.endpoint.openai import Responses

QUESTION = [{"role": "user", "content": "Weather in Paris?"}]
TOOL = {"type": "function", "function": WEATHER}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call()]}
SUNNY = {"role": "tool", "content": "Sunny.", "tool_call_id": "call00001", "name": "weather"}


@asynccontextmanager
async def client_of(session: ScriptedSession) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(session) as (server, key):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
            yield client


@asynccontextmanager
async def http_of(session: ScriptedSession) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(session) as (server, key):
        async with aiohttp.ClientSession(server.url, headers={"x-api-key": key}) as http:
            yield http


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, **({"data": body} if isinstance(body, bytes) else {"json": body})) as response:
        return response.status, await response.json()


# ------------------------------------------------------------ chat completions


async def test_chat_with_a_tool() -> None:
    session = ScriptedSession(says("", call(), reasoning="I must look."), says("It is sunny."))
    async with client_of(session) as client:
        first = await client.chat.completions.create(
            model="any", messages=QUESTION, tools=[TOOL], max_tokens=50, stop="END", temperature=0.3, user="me", seed=None
        )
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.content is None
        assert message.tool_calls is not None and json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
        assert first.usage is not None and first.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
        }
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "Sunny."}]}
        second = await client.chat.completions.create(model="any", messages=[*QUESTION, message, result], tools=[TOOL], tool_choice="none")
        assert second.choices[0].message.content == "It is sunny." and second.choices[0].finish_reason == "stop"
    one, two = session.requests
    assert (one.messages, one.tools, one.max_tokens, one.stop, one.overridden) == (QUESTION, [TOOL], 50, ("END",), ("temperature",))
    assert two.messages == [*QUESTION, {**CALLED, "reasoning_content": "I must look."}, SUNNY]
    assert (two.tools, two.max_tokens, two.stop, two.text) == ([], None, (), None)


async def test_chat_as_a_stream() -> None:
    reply = says("Both.", call(), call("time", {}, "call00002"), reasoning="Hm.")
    async with client_of(ScriptedSession(reply, reply)) as client:
        async with client.chat.completions.stream(model="m", messages=QUESTION, stream_options={"include_usage": True}) as stream:
            whole = await stream.get_final_completion()
        plain = await client.chat.completions.create(model="m", messages=QUESTION)
    streamed, given = whole.choices[0].message, plain.choices[0].message
    assert (streamed.content, streamed.reasoning_content) == (given.content, given.reasoning_content) == ("Both.", "Hm.")
    assert [(one.id, one.function.name, one.function.arguments) for one in streamed.tool_calls or ()] == [
        ("call00001", "weather", '{"city": "Paris"}'),
        ("call00002", "time", "{}"),
    ]
    assert whole.usage is not None and whole.usage.total_tokens == 12
    assert whole.choices[0].finish_reason == plain.choices[0].finish_reason == "tool_calls"


async def test_malformed_calls_come_back_as_they_were_sent() -> None:
    bad = call(call_id="call00007", problem="not valid JSON", text='{"city": Paris}')
    nameless = call("", problem="no name", text="<tool_call>?</tool_call>")
    session = ScriptedSession(says("Hm", bad, nameless), says("", finish="length"))
    async with client_of(session) as client:
        message = (await client.chat.completions.create(model="m", messages=QUESTION)).choices[0].message
        assert message.content == "Hm\n<tool_call>?</tool_call>"
        result = {"role": "tool", "tool_call_id": "call00007", "content": "Error"}
        last = await client.chat.completions.create(model="m", messages=[*QUESTION, message, result])
    assert last.choices[0].finish_reason == "length"
    back = session.requests[1].messages[1]
    assert back["content"] == "Hm\n<tool_call>?</tool_call>"
    assert back["tool_calls"] == [{**call(call_id="call00007"), "function": {"name": "weather", "arguments": '{"city": Paris}'}}]


async def test_a_malformed_call_of_valid_json_is_recognised() -> None:
    reply = says("", call("weather", {}, problem="city is missing", text='{"town":  "Paris"}'))
    session = ScriptedSession(reply, says(""))
    async with client_of(session) as client:
        message = (await client.chat.completions.create(model="m", messages=QUESTION)).choices[0].message
        await client.chat.completions.create(model="m", messages=[*QUESTION, message, {**SUNNY}])
    assert session.requests[1].messages[1] == as_sent(reply).message


async def test_completions() -> None:
    session = ScriptedSession(says(" 4"), says(" 4", finish="length"))
    async with client_of(session) as client:
        whole = await client.completions.create(model="m", prompt="2 + 2 =", max_tokens=3, stop=["\n"])
        chunks = [one async for one in await client.completions.create(model="m", prompt=["2 + 2 ="], stream=True)]
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 4", "stop")
    assert [(one.choices[0].text, one.choices[0].finish_reason) for one in chunks] == [(" 4", "length")]
    assert [(one.text, one.messages, one.max_tokens, one.stop) for one in session.requests] == [
        ("2 + 2 =", [], 3, ("\n",)),
        ("2 + 2 =", [], None, ()),
    ]


# ------------------------------------------------------------ responses


@pytest.mark.parametrize("keeps", [True, False], ids=["previous_response_id", "whole conversation"])
async def test_responses_with_a_tool(keeps: bool) -> None:
    session = ScriptedSession(says("I look.", call(), reasoning="Hm."), says("Sunny."))
    async with client_of(session) as client:
        tools = [{"type": "function", "strict": True, **WEATHER}]
        first = await client.responses.create(
            model="m", input="Weather in Paris?", instructions="Be short.", tools=tools, reasoning={"effort": "low"}, max_output_tokens=9
        )
        assert [one.type for one in first.output] == ["reasoning", "message", "function_call"] and first.output_text == "I look."
        assert first.status == "completed" and first.usage is not None and first.usage.total_tokens == 12
        result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "Sunny."}
        if keeps:
            second = await client.responses.create(model="m", input=[result], previous_response_id=first.id)
        else:
            second = await client.responses.create(model="m", input=[*QUESTION, *first.output, result])
        assert second.output_text == "Sunny."
    one, two = session.requests
    assert one.messages == [{"role": "system", "content": "Be short."}, *QUESTION]
    assert (one.tools, one.max_tokens, one.overridden) == ([TOOL], 9, ("reasoning",))
    assert two.messages == [*QUESTION, {**CALLED, "content": "I look.", "reasoning_content": "Hm."}, SUNNY]


def test_conversations_that_are_sent_whole_share_their_messages() -> None:
    kept: dict[str, list[Any]] = {}
    items, turns = [*QUESTION], 20
    for turn in range(turns):
        asked = Responses.model_validate_json(json.dumps({"input": items}), context=kept)
        assert asked.request().messages[::2] == items[::2]
        items += [*asked.response(says(f"Answer {turn}."))["output"], {"role": "user", "content": f"Question {turn}?"}]
    assert len({id(message) for conversation in kept.values() for message in conversation}) <= 3 * turns


async def test_responses_as_a_stream() -> None:
    reply = says("Both.", call(), reasoning="Hm.", finish="length")
    async with client_of(ScriptedSession(reply, says("Done.", call()))) as client:
        events = [one async for one in await client.responses.create(model="m", input="?", stream=True)]
        async with client.responses.stream(model="m", input="?") as stream:
            final = await stream.get_final_response()
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert [one.type.removeprefix("response.") for one in events] == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "incomplete",
    ]
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert final.output_text == "Done." and final.output[1].arguments == '{"city": "Paris"}'


async def test_items_of_several_turns_make_messages() -> None:
    session = ScriptedSession(says("ok"))
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "short."}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "oh"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Three."}]},
        {"type": "message", "role": "assistant", "content": "Four."},
        {"role": "user", "content": "Five?"},
    ]
    async with http_of(session) as http:
        status, _ = await post(http, "/v1/responses", {"input": items})
    assert status == 200
    calls = [call("f", {}, "a"), {**call(call_id="b"), "function": {"name": "g", "arguments": "oh"}}]
    assert session.requests[0].messages == [
        {"role": "system", "content": "Be\nshort."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "b", "name": "g"},
        {"role": "tool", "content": "1", "tool_call_id": "a", "name": "f"},
        {"role": "assistant", "content": "Three."},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Five?"},
    ]


# ------------------------------------------------------------ messages

ANTHROPIC_TURNS = [
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Paris"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "Sunny."}]},
            {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


async def test_messages() -> None:
    session = ScriptedSession(says("I look.", call(), reasoning="Hm."), says("Sunny.", reasoning="Hm.", finish="length"))
    body = {
        "model": "m",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "Be short."}],
        "messages": ANTHROPIC_TURNS,
        "tools": [{"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}],
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "top_k": 3,
    }
    async with http_of(session) as http:
        status, first = await post(http, "/v1/messages", body)
        _, second = await post(http, "/v1/messages", {"model": "m", "max_tokens": 1, "messages": QUESTION})
    assert status == 200 and first.pop("id").startswith("msg_")
    assert first == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": ANTHROPIC_TURNS[1]["content"],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 5},
    }
    # Clients that did not ask for thoughts read the text from the first block.
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "Sunny."}], "max_tokens")
    asked = session.requests[0]
    assert asked.messages == [
        {"role": "system", "content": "Be short."},
        *QUESTION,
        {**CALLED, "content": "I look.", "reasoning_content": "Hm."},
        SUNNY,
        {"role": "user", "content": "Well?"},
    ]
    assert (asked.tools, asked.max_tokens, asked.stop, asked.overridden) == ([TOOL], 50, ("END",), ("top_k", "thinking"))


async def test_messages_as_a_stream() -> None:
    session = ScriptedSession(says("Hi", call(problem="bad", text="oh"), reasoning="Hm."))
    async with http_of(session) as http:
        body = {"model": "m", "max_tokens": 5, "stream": True, "messages": QUESTION, "thinking": {"type": "adaptive"}}
        async with http.post("/v1/messages", json=body) as response:
            assert response.content_type == "text/event-stream"
            text = await response.text()
    events = [tuple(line.partition(": ")[2] for line in part.split("\n")) for part in text.strip().split("\n\n")]
    read = [json.loads(data) for _, data in events]
    assert [name for name, _ in events] == [one["type"] for one in read]
    message_id = read[0]["message"].pop("id")
    assert message_id.startswith("msg_")
    usage = {"input_tokens": 7, "output_tokens": 5}
    tool = {"type": "tool_use", "id": "call00001", "name": "weather"}
    message = {"type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None, "stop_sequence": None}
    assert read == [
        {"type": "message_start", "message": {**message, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {**tool, "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"INVALID_JSON": "oh"}'}},
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("path", "tool", "choice"),
    [
        ("/v1/chat/completions", TOOL, "required"),
        ("/v1/chat/completions", TOOL, {"type": "function", "function": {"name": "weather"}}),
        ("/v1/messages", {"name": "weather", "input_schema": WEATHER["parameters"]}, {"type": "any"}),
    ],
)
async def test_a_forced_call_is_overridden(path: str, tool: Any, choice: Any) -> None:
    """Agents force calls by default (smolagents); the model keeps its choice, and the request is counted."""
    session = ScriptedSession(says("No call."))
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": choice}
    async with serving(session) as (server, key):
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client,
            client.post(server.url + path, json=body) as got,
        ):
            assert got.status == 200, await got.text()
    [asked] = session.requests
    assert asked.overridden == ("tool_choice",) and [one["function"]["name"] for one in asked.tools] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "shown"), [({"type": "function", "name": "weather"}, "auto"), ("required", "required"), ("none", "none"), (None, "auto")]
)
async def test_a_cut_response_with_a_choice_of_tools(choice: Any, shown: str) -> None:
    """In the form that OpenAI's client knows."""
    async with http_of(ScriptedSession(says("It is", finish="length"))) as http:
        tools = [{"type": "function", "strict": True, **WEATHER}]
        _, body = await post(http, ITEMS, {"input": "?", "tools": tools, "tool_choice": choice})
    assert (body["tool_choice"], body["status"], body["output"][0]["status"]) == (shown, "incomplete", "incomplete")
    Response.model_validate({**body, "usage": None})


async def test_the_stop_sequence_of_a_message() -> None:
    session = ScriptedSession(*[says("Hi.")._replace(stop_sequence="END")] * 2)
    async with http_of(session) as http:
        body = {"model": "m", "max_tokens": 9, "messages": QUESTION, "stop_sequences": ["END"]}
        _, whole = await post(http, "/v1/messages", body)
        async with http.post("/v1/messages", json={**body, "stream": True}) as response:
            text = await response.text()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert events[0]["message"]["stop_sequence"] is None
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


async def test_an_empty_response_is_repeated_as_a_message() -> None:
    session = ScriptedSession(says(""), says("Hi."), says(""), says("Hi."))
    async with http_of(session) as http:
        _, first = await post(http, "/v1/messages", {"model": "m", "max_tokens": 9, "messages": QUESTION})
        turns = [*QUESTION, {"role": "assistant", "content": first["content"]}, *QUESTION]
        await post(http, "/v1/messages", {"model": "m", "max_tokens": 9, "messages": turns})
        _, first = await post(http, "/v1/responses", {"input": QUESTION})
        await post(http, "/v1/responses", {"input": [*QUESTION, *first["output"], *QUESTION]})
    expected = [*QUESTION, {"role": "assistant", "content": ""}, *QUESTION]
    assert session.requests[1].messages == session.requests[3].messages == expected


# ------------------------------------------------------------ what is refused

CHAT, TEXT, ITEMS, TURNS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"n": 2}, "n: 2 is not possible; a request gets one response; send several requests"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        (CHAT, {"presence_penalty": 0.5}, "would change the probabilities"),
        (CHAT, {"response_format": {"type": "json_object"}}, "describe the wanted form in the prompt"),
        (CHAT, {"guided_json": {"type": "object"}}, "guided_json"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"functions": [{}]}, "use tools"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": "many"}, "max_tokens: Input should be a valid integer"),
        (CHAT, {"stop": [1]}, "stop.0"),
        (CHAT, {"stop": [""]}, "stop.0: String should have at least 1 character"),
        (CHAT, {"stop": ["x" * 257]}, "stop.0: String should have at most 256 characters"),
        (TURNS, {"messages": QUESTION, "stop_sequences": ["x"] * 17}, "stop_sequences: List should have at most 16 items"),
        (CHAT, {"stream": "perhaps"}, "stream"),
        (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools.0: tools of type 'custom' are not available"),
        (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools.0.name: Field required"),
        (CHAT, {"tools": {}}, "tools"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages: Input should be a valid array"),
        (CHAT, {"messages": ["hello"]}, "messages.0"),
        (
            CHAT,
            {"messages": [{"role": "robot", "content": ""}]},
            "messages.0.role: Input should be 'system', 'user', 'assistant' or 'tool'",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content: {'type': 'image_url', 'image_url': {'url': 'data:'}} is not supported; the model reads text only",
        ),
        (CHAT, {"messages": [{"role": "tool", "content": "", "tool_call_id": "x"}]}, "is for call 'x'"),
        (CHAT, {"messages": [{"role": "tool", "content": ""}]}, "is for call None"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]},
            "tool_calls.0.function: Field required",
        ),
        (CHAT, [], "Input should be an object"),
        (CHAT, b"{", "Invalid JSON"),
        (CHAT, b'"' + b"[" * 100_000, "Invalid JSON"),
        (CHAT, b"[" * 100_000, "Invalid JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', "Invalid JSON"),
        (TEXT, {"prompt": [1, 2]}, "prompt"),
        (TEXT, {}, "prompt: Field required"),
        (TEXT, {"prompt": "", "echo": True}, "echo"),
        (TEXT, {"prompt": "", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "", "suffix": "."}, "suffix"),
        (TEXT, {"prompt": "", "logprobs": 3}, "logprobs"),
        (TEXT, {"prompt": "", "repetition_penalty": 1.1}, "repetition_penalty"),
        (TEXT, {"prompt": "", "messages": QUESTION}, "messages"),
        (ITEMS, {"input": "?", "prompt": {"id": "stored"}}, "prompt"),
        (ITEMS, {}, "input: Field required"),
        (ITEMS, {"input": "?", "previous_response_id": "resp_x"}, "this episode has no response 'resp_x'"),
        (ITEMS, {"input": "?", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        (ITEMS, {"input": "?", "tools": [{"type": "web_search"}]}, "offer functions"),
        (ITEMS, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        (ITEMS, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
        (ITEMS, {"input": [{"type": "function_call_output", "output": ""}]}, "call None"),
        (TURNS, {}, "messages: Field required"),
        (TURNS, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type: Input should be 'text'"),
        (TURNS, {"messages": QUESTION, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools of type 'bash_20250124'"),
        (TURNS, {"messages": QUESTION, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (TURNS, {"messages": [*QUESTION, {"role": "assistant", "content": "The"}]}, "end with the user's"),
        (TURNS, {"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, *QUESTION]}, "id"),
    ],
)
async def test_bad_requests(path: str, body: Any, said: str) -> None:
    if path == CHAT and isinstance(body, dict):
        body = {"messages": QUESTION, **body}
    session = ScriptedSession()
    async with http_of(session) as http:
        status, answer = await post(http, path, body)
    assert status == 400 and said in answer["error"]["message"], answer
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert not session.requests


async def test_harmless_values_are_accepted() -> None:
    harmless = {
        "n": 1,
        "logit_bias": None,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": None,
        "metadata": {"a": "b"},
        "store": True,
        "parallel_tool_calls": False,
        "service_tier": "auto",
        "tools": None,
        "tool_choice": None,
        "stop": None,
        "stream": None,
        "stream_options": None,
        "unheard_of": [],
        "prompt": "?",
    }
    session = ScriptedSession(says("Hi."))
    async with http_of(session) as http:
        status, answer = await post(http, CHAT, {"messages": QUESTION, **harmless})
    assert status == 200 and answer["choices"][0]["message"] == {"role": "assistant", "content": "Hi."}
    assert (session.requests[0].overridden, session.requests[0].text) == ((), None)


async def test_nulls_do_not_hide_another_name_of_a_parameter() -> None:
    session = ScriptedSession(says("Hi."))
    thought = {"role": "assistant", "content": None, "reasoning_content": None, "reasoning": "Hm."}
    async with http_of(session) as http:
        body = {"messages": [*QUESTION, thought], "max_completion_tokens": None, "max_tokens": 5}
        assert (await post(http, CHAT, body))[0] == 200
    assert session.requests[0].max_tokens == 5
    assert session.requests[0].messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


async def test_a_request_that_outlives_its_episode_is_refused() -> None:
    """Its body is still being read when the episode ends."""
    session = ScriptedSession(says("Hi."))
    async with serving(session) as (server, key):
        url = URL(server.url)
        body = json.dumps({"messages": QUESTION}).encode()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\nx-api-key: {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        await asyncio.sleep(0.1)
        server.close(key)
        writer.write(body)
        assert b"401" in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
    assert not session.requests


async def test_errors_of_the_official_client() -> None:
    session = ScriptedSession(EpisodeOver("max_turns"), ValueError("Too long."), ConnectionError("lost"), says("Hi."))
    async with client_of(session) as client:

        async def ask() -> Any:
            return await client.chat.completions.create(model="m", messages=QUESTION)

        with pytest.raises(openai.BadRequestError) as over:
            await ask()
        assert over.value.code == "episode_over" and "max_turns" in over.value.message
        with pytest.raises(openai.BadRequestError, match="Too long."):
            await ask()
        with pytest.raises(openai.InternalServerError, match="ConnectionError: lost"):
            await ask()
        assert len(session.requests) == 3  # none was tried again
        with pytest.raises(openai.AuthenticationError, match="no running episode has this API key"):
            await client.with_options(api_key="guessed").chat.completions.create(model="m", messages=QUESTION)
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not served"):
            await client.embeddings.create(model="m", input="x")
        assert [one.id async for one in client.models.list()] == ["policy"]
        assert (await ask()).choices[0].message.content == "Hi."


async def test_keys_end_with_their_episodes_and_are_of_one_only() -> None:
    first, second = ScriptedSession(says("1")), ScriptedSession(says("2"))
    async with serving(first) as (server, key):
        other = server.open(second)
        assert len({key, other}) == 2
        server.close(key)
        async with aiohttp.ClientSession(server.url) as http:
            for headers, status in (
                ({"x-api-key": key}, 401),
                ({}, 401),
                ({"Authorization": "Bearer "}, 401),
                ({"Authorization": f"Basic {other}"}, 401),
                ({"Authorization": f"bearer {other}"}, 200),
            ):
                async with http.post(CHAT, json={"messages": QUESTION}, headers=headers) as response:
                    assert response.status == status
            async with http.get("/v1/models") as response:
                assert response.status == 401
    assert not first.requests and len(second.requests) == 1


async def test_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1000)
    async with http_of(ScriptedSession()) as http:
        status, answer = await post(http, TURNS, {"messages": [{"role": "user", "content": "x" * 1000}]})
    assert status == 413 and answer["error"]["type"] == "request_too_large"


async def test_a_stream_is_kept_open_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.02)
    session = ScriptedSession(says("Hi."), EpisodeOver())
    for attempt in range(2):
        async with client_of(session) as client:
            session.gate.clear()
            stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)  # begins before the response
            assert session.finished == attempt
            session.gate.set()
            if attempt == 0:
                assert "".join([one.choices[0].delta.content or "" async for one in stream]) == "Hi."
            else:
                with pytest.raises(openai.APIError) as over:
                    _ = [one async for one in stream]
                assert over.value.code == "episode_over"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_is_sampled_to_its_end_though_the_client_goes(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.02)
    session = ScriptedSession(says("Hi."))
    session.gate.clear()
    async with http_of(session) as http:
        asked = asyncio.ensure_future(post(http, CHAT, {"messages": QUESTION, "stream": streams}))
        await session.asked.acquire()
        asked.cancel()
        await asyncio.sleep(0.1)
        assert session.finished == 0
        session.gate.set()
        await asyncio.sleep(0.05)
        assert session.finished == 1


async def test_requests_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_AT_ONCE", 2)
    session = ScriptedSession(says("1"), says("2"))
    session.gate.clear()
    async with http_of(session) as http:
        body = {"messages": QUESTION}
        first = [asyncio.ensure_future(post(http, CHAT, body)) for _ in range(2)]
        for _ in range(2):
            await session.asked.acquire()
        status, answer = await post(http, CHAT, body)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        session.gate.set()
        assert [status for status, _ in await asyncio.gather(*first)] == [200, 200]


async def test_bodies_at_a_time_are_bounded_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that begins many large requests at once does not fill the memory; an upload that breaks off is forgotten."""
    monkeypatch.setattr(server_module, "MAX_AT_ONCE", 2)
    session = ScriptedSession(*[says("Hi.")] * 1000)
    async with serving(session) as (server, key):
        url = URL(server.url)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\nx-api-key: {key}\r\nContent-Length: 9000000\r\n\r\n{{"
        begun = [await asyncio.open_connection(url.host, url.port) for _ in range(2)]
        async with aiohttp.ClientSession(server.url, headers={"x-api-key": key}) as http:

            async def until(status: int) -> None:
                for _ in range(500):
                    if (await post(http, CHAT, {"messages": QUESTION}))[0] == status:
                        return
                    await asyncio.sleep(0.01)
                raise AssertionError(f"no answer {status}")

            for _, writer in begun:
                writer.write(head.encode())
                await writer.drain()
            await until(429)
            for _, writer in begun:
                writer.close()
            await until(200)


async def test_bytes_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of requests that wait for a response too: their bodies are kept."""
    monkeypatch.setattr(server_module, "MAX_EPISODE_BYTES", 20_000)
    session = ScriptedSession(*[says("Hi.")] * 5)
    session.gate.clear()
    body = {"messages": QUESTION, "metadata": {"x": "x" * 15_000}}
    async with http_of(session) as http:
        first = asyncio.ensure_future(post(http, CHAT, body))
        await session.asked.acquire()
        status, answer = await post(http, CHAT, body)
        assert status == 429 and "have 15" in answer["error"]["message"]
        small = asyncio.ensure_future(post(http, CHAT, {"messages": QUESTION}))
        await session.asked.acquire()
        session.gate.set()
        assert [status for status, _ in await asyncio.gather(first, small)] == [200, 200]
        assert (await post(http, CHAT, body))[0] == 200
        async with http.post(CHAT, data=iterated(b"{}")) as response:
            assert response.status == 429, "of unknown size"


async def iterated(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def test_floods_of_malformed_json_cost_nothing() -> None:
    session = ScriptedSession(says("Hi."))
    async with http_of(session) as http:
        answers = await asyncio.gather(*(post(http, CHAT, b"{" * 10_000) for _ in range(50)))
        assert {status for status, _ in answers} <= {400, 429} and not session.requests
        assert (await post(http, CHAT, {"messages": QUESTION}))[0] == 200


async def test_stopping_does_not_wait_for_responses() -> None:
    session = ScriptedSession()
    session.gate.clear()
    async with serving(session) as (server, key):
        async with aiohttp.ClientSession(server.url, headers={"x-api-key": key}) as http:
            asked = asyncio.ensure_future(post(http, CHAT, {"messages": QUESTION}))
            await session.asked.acquire()
            await asyncio.wait_for(server.stop(), 3)
            with pytest.raises(aiohttp.ClientError):
                await asked
