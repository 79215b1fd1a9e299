"""Agents of several frameworks, each with a tool, against the endpoint. A framework that is not installed is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support_endpoint import ScriptedSession, call, says, serving

TASK = "What is the weather in Paris?"


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Name of the city.
    """
    return f"Sunny in {city}."


def script(reasoning: str | None = None, name: str = "weather", arguments: dict[str, Any] | None = None) -> ScriptedSession:
    """A call of the tool, and the answer."""
    return ScriptedSession(says("I look.", call(name, arguments), reasoning=reasoning), says("It is sunny.", reasoning=reasoning))


def played(session: ScriptedSession) -> list[dict[str, Any]]:
    """Messages of the last request after the user's first one, which must continue the first request."""
    first, last = session.requests
    assert [one["function"]["name"] for one in last.tools] == ["weather"]
    assert last.tools[0]["function"]["parameters"]["properties"]["city"]["type"] == "string"
    assert last.messages[: len(first.messages)] == first.messages
    assert first.messages[-1] == {"role": "user", "content": TASK}
    return last.messages[len(first.messages) :]


def turns(reasoning: str | None = None) -> list[dict[str, Any]]:
    """The call and its result, in the common form."""
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call()]}
    if reasoning:
        message["reasoning_content"] = reasoning
    return [message, {"role": "tool", "content": "Sunny in Paris.", "tool_call_id": "call00001", "name": "weather"}]


async def test_replies_have_every_field_of_the_clients_types() -> None:
    """Clients fill in nothing, and check nothing themselves."""
    openai = pytest.importorskip("openai")
    types, session = openai.types, ScriptedSession(*[says("I look.", call(), reasoning="Hm.") for _ in range(2)], says(" It is sunny."))
    async with serving(session) as (server, key), openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        for kind, body in {
            types.responses.Response: (await client.responses.with_raw_response.create(model="m", input=TASK)).text,
            types.chat.ChatCompletion: (
                await client.chat.completions.with_raw_response.create(model="m", messages=[{"role": "user", "content": TASK}])
            ).text,
            types.Completion: (await client.completions.with_raw_response.create(model="m", prompt=TASK)).text,
        }.items():
            kind.model_validate_json(body)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_anthropic(streams: bool, thinks: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    session = script("Hm.")
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinks else {}
    async with serving(session) as (server, key), anthropic.AsyncAnthropic(base_url=server.url, api_key=key) as client:
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=2000,
            messages=[{"role": "user", "content": TASK}],
            tools=[anthropic.beta_async_tool(_async_weather, name="weather")],
            stream=streams,
            **thinking,
        )
        message: Any = None
        async for message in runner:
            if streams:
                message = await message.get_final_message()
        assert [one.text for one in message.content if one.type == "text"] == ["It is sunny."]
        assert message.stop_reason == "end_turn" and message.usage.output_tokens == 5
    assert played(session) == turns("Hm." if thinks else None)


async def _async_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Name of the city.
    """
    return weather(city)


async def test_errors_of_anthropic() -> None:
    anthropic = pytest.importorskip("anthropic")
    from roll_lite.environments.base import EpisodeOver

    session = ScriptedSession(EpisodeOver("max_turns"), RuntimeError("lost"))
    async with serving(session) as (server, key), anthropic.AsyncAnthropic(base_url=server.url, api_key=key) as client:
        ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": TASK}]}
        with pytest.raises(anthropic.BadRequestError, match="max_turns") as over:
            await client.messages.create(**ask)
        assert over.value.body["error"]["code"] == "episode_over"
        with pytest.raises(anthropic.InternalServerError, match="lost"):
            await client.messages.create(**ask)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="guessed").messages.create(**ask)
        with pytest.raises(anthropic.NotFoundError, match="count_tokens"):
            await client.messages.count_tokens(model="m", messages=ask["messages"])
        assert [one.id async for one in await client.models.list()] == ["policy"]
    assert len(session.requests) == 2  # none was tried again


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("streams", [False, True])
async def test_langgraph(api: str, streams: bool) -> None:
    agents = pytest.importorskip("langchain.agents")
    session = script()
    async with serving(session) as (server, key):
        model: Any
        if api == "anthropic":
            model = pytest.importorskip("langchain_anthropic").ChatAnthropic(
                model="m", base_url=server.url, api_key=key, temperature=0.5, streaming=streams
            )
        else:
            model = pytest.importorskip("langchain_openai").ChatOpenAI(
                model="m",
                base_url=f"{server.url}/v1",
                api_key=key,
                use_responses_api=api == "responses",
                temperature=0.5,
                streaming=streams,
                stream_usage=True,
            )
        graph = agents.create_agent(model, [weather])
        messages: Any
        if streams:
            texts = [
                piece.text async for piece, _ in graph.astream({"messages": TASK}, stream_mode="messages") if piece.type == "AIMessageChunk"
            ]
            assert "".join(texts) == "I look.It is sunny."
        else:
            messages = (await graph.ainvoke({"messages": TASK}))["messages"]
            assert messages[-1].text == "It is sunny." and messages[-1].usage_metadata["output_tokens"] == 5
    assert played(session) == turns()
    assert session.requests[0].overridden == ("temperature",)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streams", [False, True])
async def test_openai_agents(api: str, streams: bool) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    session = script("Hm.")
    async with serving(session) as (server, key), openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        model_class = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(
            name="meteorologist",
            instructions="Be short.",
            model=model_class("m", client),
            model_settings=agents.ModelSettings(include_usage=True),
            tools=[agents.function_tool(weather)],
        )
        if streams:
            result = agents.Runner.run_streamed(agent, TASK)
            kinds = {event.type async for event in result.stream_events()}
            assert "run_item_stream_event" in kinds
        else:
            result = await agents.Runner.run(agent, TASK)
        assert result.final_output == "It is sunny."
        assert result.context_wrapper.usage.output_tokens == 10
    # Its chat completions drop the thoughts.
    assert played(session) == turns("Hm." if api == "responses" else None)


@pytest.mark.parametrize("streams", [False, True])
async def test_smolagents(streams: bool) -> None:
    smolagents = pytest.importorskip("smolagents")
    session = ScriptedSession(says("I look.", call()), says("", call("final_answer", {"answer": "It is sunny."})))
    async with serving(session) as (server, key):
        model = smolagents.OpenAIModel("m", api_base=f"{server.url}/v1", api_key=key, tool_choice="auto")
        agent = smolagents.ToolCallingAgent([smolagents.tool(weather)], model, stream_outputs=streams, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, TASK) == "It is sunny."
    first, last = session.requests
    assert [one["function"]["name"] for one in first.tools] == ["weather", "final_answer"]
    assert [one["role"] for one in first.messages] == ["system", "user"] and TASK in first.messages[1]["content"]
    assert last.messages[:2] == first.messages
    # It writes calls and results as texts.
    assert "Sunny in Paris." in last.messages[-1]["content"]


async def test_code_agent_of_smolagents() -> None:
    smolagents = pytest.importorskip("smolagents")
    session = ScriptedSession(says("I look.\n<code>\nfinal_answer(weather('Paris'))\n"))
    async with serving(session) as (server, key):
        model = smolagents.OpenAIModel("m", api_base=f"{server.url}/v1", api_key=key)
        agent = smolagents.CodeAgent([smolagents.tool(weather)], model, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, TASK) == "Sunny in Paris."
    assert "</code>" in session.requests[0].stop
