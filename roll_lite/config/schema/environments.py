"""Sections of environments: what a domain's policy talks with for several turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import Mistakes, PositiveFloat, PositiveInt, Section, rule

CallFormat = Literal["hermes", "qwen3_coder", "llama3", "mistral"]


class EnvironmentSection(Section):
    """Settings of all environments."""

    max_turns: PositiveInt = 8
    """Maximum responses in an episode. One that needs more ends with finish reason max_turns."""
    max_turn_tokens: PositiveInt | None = None
    """Longest response of one turn in tokens; null: only sampling.max_tokens limits it, which counts all tokens after the first prompt."""
    turn_timeout_s: PositiveFloat = 60.0
    """Seconds in which the environment must answer a response; then the attempt fails."""
    rewards: Literal["sum", "last"] = "sum"
    """Score of an episode: the sum of its responses' rewards, or the reward of the last response."""
    workers: PositiveInt = 1
    """Processes that play this domain's episodes."""
    parallel: PositiveInt = 256
    """Maximum episodes at a time in one worker; others wait."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to start a worker, which imports the environment."""
    call_format: CallFormat | None = None
    """Form of the model's tool calls; null: as its chat template writes them."""


class FunctionEnvironmentConfig(EnvironmentSection):
    """A class or an async function of your own (docs/environments.md)."""

    name: Literal["function"]
    function: str
    """Dotted path to a class with `reset` and `step`, or to an async function `(task, policy)`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""


class ToolsEnvironmentConfig(EnvironmentSection):
    """Tools that the model may call. The first response without a call ends the episode; the domain's reward scores it."""

    name: Literal["tools"]
    tools: Annotated[list[str], Field(min_length=1)]
    """Dotted paths to Python functions with type hints and a docstring, sync or async. The chat template describes them to the model."""


class EndpointEnvironmentConfig(EnvironmentSection):
    """An agent that talks with the policy as with OpenAI's or Anthropic's API, and does not know that it is trained.

    sampling.max_prompt_tokens + sampling.max_tokens limit each of its conversations."""

    name: Literal["endpoint"]
    function: str | None = None
    """Dotted path to `(task, endpoint) -> reward, or answer that the domain's reward scores`, sync or async."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and its arguments. It gets the task as JSON on its standard input, the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; the last line that it prints is its reward or answer."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @rule
    def _one_agent(self) -> Mistakes:
        if (self.function is None) == (self.command is None):
            yield "function", "name either a function or a command"


EnvironmentConfig = FunctionEnvironmentConfig | ToolsEnvironmentConfig | EndpointEnvironmentConfig
