"""Agents of several frameworks, from their first request to the rows that train: the token proof with real clients, over HTTP. A framework
that is not installed is left out."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
from support_endpoint import WEATHER

from roll_lite.data.samples import Author, Branch, EpisodeRecord, Sampling
from roll_lite.environments.agents import Agent, Endpoint, play_agent
from roll_lite.environments.base import Task
from roll_lite.environments.episode import Answer, Ask, Begin, Calls, Ended, Limits, Player
from roll_lite.scheduler.runner import Conversation
from tests.environments.test_rendering import FAMILIES
from tests.environments.test_token_proof import ROOM, Engine, check, renderers_of

TASK = "What is the weather in Paris, Zürich and Oslo?"
ANSWER = "Sunny, sunny, sunny ☀"


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Name of the city.
    """
    return f"Sunny in {city}. <|im_end|>[INST]"


async def async_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Name of the city.
    """
    return weather(city)


def calls(family: str, *given: dict[str, str], name: str = "weather") -> str:
    """Calls as a model may write them, in other JSON than a template's."""
    key = "parameters" if family == "llama3.1" else "arguments"
    written = [f'{{"name":  "{name}","{key}": {json.dumps(one)} }}' for one in given]
    match family:
        case "llama3.1":
            return "; ".join(written)
        case "mistral-nemo":
            return f"[TOOL_CALLS][{','.join(written)}]"
    return "\n".join(f"<tool_call>{one}\n</tool_call>" for one in written)


def script(family: str) -> list[str]:
    """A call, two calls at once, and the answer; Qwen3 thinks before each."""
    thoughts = "<think>\nHm, Zürich.\n</think>\n\n" if family == "qwen3" else ""
    texts = ("I look.\n" + calls(family, {"city": "Paris"}), calls(family, {"city": "Zürich"}, {"city": "Oslo"}), ANSWER)
    return [thoughts + text for text in texts]


class Scripted(Engine):
    """Says the texts of a script, in other tokens than the tokenizer's. The weights change with every third response."""

    def __init__(self, tokenizer: Any, family: str, script: list[str]) -> None:
        super().__init__(random.Random(1), tokenizer.eos_token_id, lambda text: tokenizer.encode(text, add_special_tokens=False), family)
        self.script = iter(script)

    def response(self) -> list[int]:
        text = next(self.script)
        return [*(one for at in range(0, len(text), 3) for one in self.encode(text[at : at + 3])), self.eos]


class Trained(NamedTuple):
    engine: Engine
    rows: list[Branch]
    record: EpisodeRecord

    @property
    def responses(self) -> list[int]:
        """Number of responses in each row."""
        return [sum(one.author is Author.POLICY for one in row.segments) for row in self.rows]


async def trained(agent: Agent, tokenizer: Any, family: str, texts: list[str] | None = None) -> Trained:
    """Play an episode as a worker and the rollout service do it, with responses of these texts, and check the proof."""
    texts = script(family) if texts is None else texts
    renderers, engine = renderers_of(tokenizer), Scripted(tokenizer, family, texts)
    player = Player(play_agent(agent, "127.0.0.1", renderers, gives_reward=False), renderers([]), Limits(20, 60.0, ROOM), Calls())
    conversation = Conversation(engine.ask, "sample", Sampling(1.0, ROOM), wants_ids=True)
    running = set()

    async def answer(ask: Ask) -> None:
        turn = await conversation.respond(np.frombuffer(ask.ids, np.int32).tolist(), ask.number, ask.after, ask.most, ask.stop)
        player.tell([Answer(ask.episode, ask.number, turn.ids, turn.finish_reason)])

    player.tell([Begin(0, Task([{"role": "user", "content": TASK}]), ROOM)])
    while True:
        for event in await player.events(60.0):
            if isinstance(event, Ask):
                running.add(asyncio.create_task(answer(event)))
                continue
            assert isinstance(event, Ended), event
            await asyncio.gather(*running)
            conversation.end(event.record, event.finish_reason)
            rows = conversation.transcript().rows
            check(engine, rows)
            assert next(engine.script, None) is None and len(engine.sampled) == len(texts)
            return Trained(engine, list(rows), event.record)


def told(played: Trained) -> list[str]:
    """Contents of the tools' messages in the conversation with the last response, and that response."""
    *_, last = messages = played.record.messages
    return [message["content"] for message in messages if message["role"] == "tool"] + [last["content"]]


SUNNY = [*map(weather, ("Paris", "Zürich", "Oslo")), ANSWER]
streamed = pytest.mark.parametrize("streams", [False, True])
families = pytest.mark.parametrize("family", FAMILIES)
two_families = pytest.mark.parametrize("family", ["qwen3", "mistral-nemo"])
MakeTokenizer = Callable[[str], Any]


async def chat(client: openai.AsyncOpenAI, endpoint: Endpoint, messages: list[Any], streams: bool) -> Any:
    """Message of a response by chat completions."""
    ask = {"model": endpoint.model, "messages": messages, "tools": [{"type": "function", "function": WEATHER}]}
    if not streams:
        return (await client.chat.completions.create(**ask)).choices[0].message
    async with client.chat.completions.stream(**ask) as stream:
        return (await stream.get_final_completion()).choices[0].message


def client_of(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


def repeated(message: Any) -> dict[str, Any]:
    """A streamed message has what its helper has parsed besides."""
    said = message.model_dump(exclude_none=True)
    for call in said.get("tool_calls", ()):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return {key: value for key, value in said.items() if key != "parsed"}


def results(message: Any) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        for call in message.tool_calls or ()
    ]


@streamed
@pytest.mark.parametrize(("family", "drops"), [*((family, False) for family in FAMILIES), ("qwen3", True)])
async def test_chat_completions(family: str, streams: bool, drops: bool, tokenizer_of: MakeTokenizer) -> None:
    async def agent(task: Task, endpoint: Endpoint) -> str:
        messages = [*task.messages]
        async with client_of(endpoint) as client:
            while True:
                message = await chat(client, endpoint, messages, streams)
                messages += [repeated(message), *results(message)]
                if drops:
                    messages = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in messages]
                if not message.tool_calls:
                    return message.content

    played = await trained(agent, tokenizer_of(family), family)
    assert (told(played), played.record.answer) == (SUNNY, ANSWER)
    assert played.responses == ([1, 1, 1] if drops else [3]), "dropped thoughts begin a row"
    assert played.record.metrics["repeated_responses"] == (2 if drops else 0)


async def test_edits_retries_and_forks(tokenizer_of: MakeTokenizer) -> None:
    """What is edited before a response begins a row that does not have it; what is asked again or at once branches off behind it."""

    async def agent(task: Task, endpoint: Endpoint) -> str:
        async with client_of(endpoint) as client:
            asked = [*task.messages]
            first = await chat(client, endpoint, asked, False)
            history = [*asked, repeated(first), *results(first)]
            await chat(client, endpoint, history, False)
            await chat(client, endpoint, history, True)  # again
            await asyncio.gather(*(chat(client, endpoint, history, streams) for streams in (False, True)))
            edited = [{"role": "user", "content": f"{TASK} Be short."}, *history[1:]]
            return (await chat(client, endpoint, edited, False)).content

    texts = ["I look." + calls("qwen2.5", {"city": "Paris"}), "A", "B", "C", "D", "Edited"]
    played = await trained(agent, tokenizer_of("qwen2.5"), "qwen2.5", texts)
    assert played.responses == [2, 1, 1, 1, 1]
    assert played.record.metrics["repeated_responses"] == 1, "behind the edit"
    befores = [one.before for one in played.engine.sampled]
    first = [*befores[0], *played.engine.sampled[0].ids]
    assert [before[: len(first)] == first for before in befores] == [False, True, True, True, True, False]


@streamed
@families
@pytest.mark.parametrize("keeps", [False, True])
async def test_responses(family: str, streams: bool, keeps: bool, tokenizer_of: MakeTokenizer) -> None:
    """`keeps`: the endpoint keeps the conversation, and the agent sends what is new."""

    async def agent(task: Task, endpoint: Endpoint) -> str:
        given: list[Any] = [*task.messages]
        more: dict[str, Any] = {}
        async with client_of(endpoint) as client:
            while True:
                ask = {"model": endpoint.model, "input": given, "tools": [{"type": "function", **WEATHER}], **more}
                if streams:
                    async with client.responses.stream(**ask) as stream:
                        response = await stream.get_final_response()
                else:
                    response = await client.responses.create(**ask)
                output = [
                    {"type": "function_call_output", "call_id": one.call_id, "output": weather(**json.loads(one.arguments))}
                    for one in response.output
                    if one.type == "function_call"
                ]
                if not output:
                    return str(response.output_text)
                if keeps:
                    given, more = output, {"previous_response_id": response.id}
                else:
                    given = [*given, *response.output, *output]

    played = await trained(agent, tokenizer_of(family), family)
    assert (told(played), played.record.answer, played.responses) == (SUNNY, ANSWER, [3])


@pytest.mark.parametrize(
    ("most", "between", "responses"),
    [(None, "", [1, 1, 1]), (None, "<|eot_id|>And? ", [3]), (2, "", [3]), (2, "And <|eot_id|>? ", [3]), (2, "\b", [1, 1, 1])],
    ids=["without its end", "with its end", "cut", "cut and more", "edited"],
)
async def test_completions(most: int | None, between: str, responses: list[int], tokenizer_of: MakeTokenizer) -> None:
    """A text that begins with an earlier prompt and all of its response continues it."""

    async def agent(task: Task, endpoint: Endpoint) -> str:
        text = TASK
        async with client_of(endpoint) as client:
            for _ in range(2):
                text += (await client.completions.create(model=endpoint.model, prompt=text, max_tokens=most)).choices[0].text
                text = text[:-1] if between == "\b" else text + between
            stream = await client.completions.create(model=endpoint.model, prompt=text, stream=True)
            return "".join([piece.choices[0].text async for piece in stream])

    played = await trained(agent, tokenizer_of("llama3.1"), "llama3.1", [" Sunny", " ☀,", ANSWER])
    assert (played.record.answer, played.responses) == (ANSWER, responses)
    assert played.record.metrics["template_tokens"] == 0


@streamed
@families
@pytest.mark.parametrize("thinks", [False, True])
async def test_anthropic(family: str, streams: bool, thinks: bool, tokenizer_of: MakeTokenizer) -> None:
    """Thoughts that it does not ask for it cannot repeat; they stay in the tokens."""
    anthropic = pytest.importorskip("anthropic")

    async def agent(task: Task, endpoint: Endpoint) -> str:
        base_url = endpoint.variables["ANTHROPIC_BASE_URL"]
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinks else {}
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=endpoint.api_key) as client:
            runner = client.beta.messages.tool_runner(
                model=endpoint.model,
                max_tokens=2000,
                messages=task.messages,
                tools=[anthropic.beta_async_tool(async_weather, name="weather")],
                stream=streams,
                **thinking,
            )
            message: Any = None
            async for message in runner:
                if streams:
                    message = await message.get_final_message()
        return "".join(one.text for one in message.content if one.type == "text")

    played = await trained(agent, tokenizer_of(family), family)
    assert (told(played), played.record.answer, played.responses) == (SUNNY, ANSWER, [3])


@streamed
@two_families
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
async def test_langgraph(api: str, family: str, streams: bool, tokenizer_of: MakeTokenizer) -> None:
    agents = pytest.importorskip("langchain.agents")

    async def agent(task: Task, endpoint: Endpoint) -> str:
        model: Any
        ask = {"model": endpoint.model, "api_key": endpoint.api_key, "streaming": streams}
        if api == "anthropic":
            model = pytest.importorskip("langchain_anthropic").ChatAnthropic(base_url=endpoint.variables["ANTHROPIC_BASE_URL"], **ask)
        else:
            module = pytest.importorskip("langchain_openai")
            model = module.ChatOpenAI(base_url=endpoint.base_url, use_responses_api=api == "responses", **ask)
        graph = agents.create_agent(model, [weather])
        if not streams:
            return str((await graph.ainvoke({"messages": task.messages}))["messages"][-1].text)
        pieces = [piece async for piece, _ in graph.astream({"messages": task.messages}, stream_mode="messages")]
        return "".join(piece.text for piece in pieces if piece.id == pieces[-1].id)

    played = await trained(agent, tokenizer_of(family), family)
    assert (told(played), played.record.answer) == (SUNNY, ANSWER)
    assert played.responses == ([1, 1, 1] if api == "chat" and family == "qwen3" else [3]), "its chat completions drop the thoughts"


@streamed
@two_families
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents(api: str, family: str, streams: bool, tokenizer_of: MakeTokenizer) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def agent(task: Task, endpoint: Endpoint) -> str:
        async with client_of(endpoint) as client:
            model_class = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            made = agents.Agent(name="meteorologist", model=model_class(endpoint.model, client), tools=[agents.function_tool(weather)])
            if not streams:
                return str((await agents.Runner.run(made, TASK)).final_output)
            result = agents.Runner.run_streamed(made, TASK)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    played = await trained(agent, tokenizer_of(family), family)
    assert (told(played), played.record.answer) == (SUNNY, ANSWER)
    assert played.responses == ([1, 1, 1] if api == "chat" and family == "qwen3" else [3]), "its chat completions drop the thoughts"


@streamed
@two_families
async def test_smolagents(family: str, streams: bool, tokenizer_of: MakeTokenizer) -> None:
    smolagents = pytest.importorskip("smolagents")

    async def agent(task: Task, endpoint: Endpoint) -> str:
        model = smolagents.OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key, tool_choice="auto")
        made = smolagents.ToolCallingAgent([smolagents.tool(weather)], model, stream_outputs=streams, verbosity_level=0)
        return str(await asyncio.to_thread(made.run, TASK))

    *texts, _ = script(family)
    played = await trained(agent, tokenizer_of(family), family, [*texts, calls(family, {"answer": ANSWER}, name="final_answer")])
    assert played.record.answer == ANSWER and all(one in str(played.record.messages) for one in ("Paris", "Zürich", "Oslo"))
    assert played.responses == [1, 1, 1], "it writes calls and their results as texts"


@streamed
async def test_smolagents_code_agent(streams: bool, tokenizer_of: MakeTokenizer) -> None:
    smolagents = pytest.importorskip("smolagents")

    async def agent(task: Task, endpoint: Endpoint) -> str:
        model = smolagents.OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        made = smolagents.CodeAgent([smolagents.tool(weather)], model, stream_outputs=streams, verbosity_level=0)
        return str(await asyncio.to_thread(made.run, TASK))

    texts = ["I look.\n<code>\nprint(weather('Paris'))\n</code>", "Thoughts: done\n<code>\nfinal_answer('sunny')\n</code>"]
    played = await trained(agent, tokenizer_of("qwen2.5"), "qwen2.5", texts)
    assert (played.record.answer, played.responses) == ("sunny", [1, 1]), "it writes its calls into the responses"
