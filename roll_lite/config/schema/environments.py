"""Sections of environments: what a domain's policy talks with for several turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import PositiveFloat, PositiveInt, Section

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


EnvironmentConfig = FunctionEnvironmentConfig | ToolsEnvironmentConfig
