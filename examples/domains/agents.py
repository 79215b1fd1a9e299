"""A black-box agent (tiny_agent): a plain program on the OpenAI SDK, which does not know that its model is being trained."""

from __future__ import annotations

import json

from openai import AsyncOpenAI

from roll_lite.environments.agents import Endpoint
from roll_lite.environments.base import Task
from roll_lite.examples.domains.turns import calculate

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute the value of an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Whole numbers with + - and *."}},
            "required": ["expression"],
        },
    },
}
MOST_CALLS = 3
CLIENT = AsyncOpenAI(api_key="of the episode")
"""Shared, since a client of its own costs an episode 50 ms."""


async def calculator(task: Task, endpoint: Endpoint) -> str:
    """Answer a question with a calculator; the domain's reward scores the answer."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = list(task.messages)
    for _ in range(MOST_CALLS):
        completion = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[CALCULATE])
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                result = calculate(**json.loads(call.function.arguments))
            except Exception as error:  # the model is told what was wrong with its call
                result = f"Error: {type(error).__name__}: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
